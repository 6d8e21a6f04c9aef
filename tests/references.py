"""Float64 references in plain Python, written from the equations alone: they call nothing of the product.

Rows are lists of floats, masks lists of 0 and 1. Means and variances are exact (rationals), sums `math.fsum`.
"""

import math
import random
import struct
from fractions import Fraction

FLOOR = 1e-8            # of the variance
EPSILON = 1e-6          # on the group's standard deviation


# ------------------------------------------------------------------------------------------------- advantages
def shaped_rewards(rewards, old, ref, mask, beta):
    out = []
    for reward, o, r, m in zip(rewards, old, ref, mask, strict=True):
        valid = [t for t in range(len(m)) if m[t]]
        row = [0.0] * len(m)
        for t in valid:
            row[t] = -beta * (o[t] - r[t])
        if valid:
            row[valid[-1]] += reward
        out.append(row)
    return out


def returns(token_rewards, mask, gamma):
    """The definition, a sum per position; no running value."""
    return [[math.fsum(gamma ** (u - t) * row[u] for u in range(t, len(m)) if m[u]) if m[t] else 0.0
             for t in range(len(m))] for row, m in zip(token_rewards, mask, strict=True)]


def moments(values):
    """(count, mean, population variance) as exact rationals."""
    exact = [Fraction(v) for v in values]
    mean = sum(exact) / len(exact)
    return len(exact), mean, sum((v - mean) ** 2 for v in exact) / len(exact)


def valid_values(rows, mask):
    return [x for row, m in zip(rows, mask, strict=True) for x, valid in zip(row, m, strict=True) if valid]


def normalized(rows, mask):
    _, mean, var = moments(valid_values(rows, mask))
    scale = 1 / math.sqrt(max(float(var), FLOOR))
    return [[float(Fraction(x) - mean) * scale if valid else 0.0 for x, valid in zip(row, m, strict=True)]
            for row, m in zip(rows, mask, strict=True)]


def grouped(rewards, ids, std=False, valid=None):
    valid = valid or [True] * len(rewards)
    out = []
    for own, own_id, counts in zip(rewards, ids, valid, strict=True):
        if not counts:
            out.append(0.0)
            continue
        members = [Fraction(r) for r, i, v in zip(rewards, ids, valid, strict=True) if i == own_id and v]
        mean = sum(members) / len(members)
        centred = float(Fraction(own) - mean)
        if std:
            spread = sum((r - mean) ** 2 for r in members) / max(len(members) - 1, 1)
            centred /= math.sqrt(spread) + EPSILON
        out.append(centred)
    return out


def advantages(algo, rewards, mask, ids, old, ref, beta, gamma):
    """(advantages, raw advantages, returns or None)"""
    def spread(per_row):
        return [[a if v else 0.0 for v in m] for a, m in zip(per_row, mask, strict=True)]

    valid = [any(m) for m in mask]
    if algo == "grpo":
        return spread(grouped(rewards, ids, True, valid)), spread(grouped(rewards, ids, False, valid)), None
    if algo == "reinforce_pp_baseline":
        raw = spread(grouped(rewards, ids, False, valid))
        return normalized(raw, mask), raw, None
    raw = returns(shaped_rewards(rewards, old, ref, mask, beta), mask, gamma)
    return normalized(raw, mask), raw, raw


# ----------------------------------------------------------------------------------------------------- losses
def surrogate(logp, old, advantage, clip):
    """(loss, d loss / d logp, clipped) of one token, by the four quadrants."""
    ratio = math.exp(logp - old)
    if advantage > 0 and ratio > 1 + clip:
        return -(1 + clip) * advantage, 0.0, True
    if advantage < 0 and ratio < 1 - clip:
        return -(1 - clip) * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


def kl(kind, logp, ref):
    """(value, d value / d logp) of one token."""
    d = logp - ref
    return {"k1": (d, 1.0), "k2": (0.5 * d * d, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}[kind]


def response_weights(mask, total):
    """d response mean / d x_it"""
    return [[valid / (max(sum(m), 1) * total) for valid in m] for m in mask]


def response_mean(x, mask, total):
    return math.fsum(math.fsum(v for v, valid in zip(row, m, strict=True) if valid) / max(sum(m), 1)
                     for row, m in zip(x, mask, strict=True)) / total


def softmax_kl(logits, ref_logits):
    """(KL(pi || ref), its gradient by the logits of pi, pi): d KL / d z_a = p_a (log p_a / q_a - KL)."""
    p, q = ([math.exp(z) / math.fsum(map(math.exp, zs)) for z in zs] for zs in (logits, ref_logits))
    value = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return value, [a * (math.log(a / b) - value) for a, b in zip(p, q, strict=True)], p


# -------------------------------------------------------------------------------------- cases, distance
def float32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def ragged(seed, min_spread=False):
    """A random batch: groups of K, interleaved; padding, holes and (rarely) fully masked responses; values
    that float32 holds exactly. With `min_spread` the rewards of every group differ."""
    rng = random.Random(seed)
    size, groups, width = rng.choice((2, 3, 5)), rng.choice((1, 2, 4)), rng.choice((1, 3, 7, 11))
    ids = [row for row in rng.sample(range(100), groups) for _ in range(size)]
    rng.shuffle(ids)
    mask = []
    for _ in ids:
        length, start = rng.randint(0 if rng.random() < 0.2 else 1, width), rng.random() < 0.2
        mask.append([int(start <= t < length and rng.random() > 0.15) for t in range(width)])
    mask[rng.randrange(len(mask))][rng.randrange(width)] = 1
    rewards = [float32(rng.choice((0.0, 1.0, 0.25, rng.uniform(-2, 3)))) for _ in ids]
    if min_spread:
        rewards = [float32(reward + 3 * n) for n, reward in enumerate(rewards)]
    old = [[float32(-rng.expovariate(0.7)) for _ in range(width)] for _ in ids]
    near = [[float32(x + rng.gauss(0, 0.4)) for x in row] for row in old]
    ref = [[float32(x + rng.gauss(0, 0.6)) for x in row] for row in old]
    adv = [[float32(rng.choice((0.0, rng.gauss(0, 1)))) for _ in row] for row in old]
    return dict(rewards=rewards, ids=ids, size=size, mask=mask, old=old, logp=near, ref=ref, adv=adv,
                beta=rng.choice((0.0, 0.01, 0.7)), gamma=rng.choice((1.0, 1.0, 0.9)))


def gap(actual, expected):
    """Largest |actual - expected| / (1 + |expected|), that is, the atol = rtol that just holds. Infinite when
    a number is missing, too many or NaN. Tensors are read with .tolist()."""
    actual = actual.double().tolist() if hasattr(actual, "tolist") else actual
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return math.inf
        return max((gap(a, e) for a, e in zip(actual, expected, strict=True)), default=0.0)
    if isinstance(actual, list):
        return math.inf
    error = abs(actual - float(expected)) / (1 + abs(float(expected)))
    return error if error == error else math.inf
