"""Losses, their gradients and their reduction against references that share no code. The name of a test
begins with the function it is about: surrogate_, k1_, k2_, k3_ (all: kinds_), mean_, total_ (everything).
"""

import math

import pytest
import references as ref
import torch

from advantage import ALGORITHMS, compute_advantages
from loss import clipped_surrogate, kl_k1, kl_k2, kl_k3, response_mean

SEEDS = range(200)
PRECISIONS = [(torch.float32, 1e-6), (torch.float64, 1e-9), (torch.bfloat16, 1e-6)]
SENTINELS = [-12345.0, math.nan, math.inf, -math.inf]
CATALOGUE = [[1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]]      # lengths 1, 3, 5
KINDS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def load(case, dtype):
    """The case's [B,T] values as tensors (logp with gradient), and as lists exactly what these hold."""
    x = {name: torch.tensor(case[name], dtype=dtype) for name in ("logp", "old", "ref", "adv")}
    exact = {name: t.double().tolist() for name, t in x.items()}
    x["logp"].requires_grad_()
    return x, exact, torch.tensor(case["mask"]).bool()


def on_valid(case, function, *rows):
    """function(values of one token) on valid tokens, zeros elsewhere: [B][T] lists, one per output."""
    cells = [[function(*values) if m else None for m, *values in zip(*row, strict=True)]
             for row in zip(case["mask"], *rows, strict=True)]
    width = len(next(c for row in cells for c in row if c is not None))
    return [[[0.0 if c is None else float(c[i]) for c in row] for row in cells] for i in range(width)]


@pytest.fixture
def catalogue():
    mask, generator = torch.tensor(CATALOGUE).bool(), torch.Generator().manual_seed(5)
    logp, old, advantage = (torch.randn(mask.shape, generator=generator) for _ in range(3))
    return logp, old, advantage, mask


# ------------------------------------------------------------------------------------ clipped surrogate
@pytest.mark.parametrize("dtype, tol", PRECISIONS)
def test_surrogate_random_cases(dtype, tol, record_property):
    worst, worst_grad, quadrants = 0.0, 0.0, set()
    for seed in SEEDS:
        case = ref.ragged(seed)
        x, exact, mask = load(case, dtype)
        loss, clipped = clipped_surrogate(x["logp"], x["old"], x["adv"], mask, 0.2)
        loss.sum().backward()
        value, grad, cut = on_valid(case, lambda a, b, c: ref.surrogate(a, b, c, 0.2), exact["logp"],
                                    exact["old"], exact["adv"])
        worst = max(worst, ref.gap(loss, value))
        worst_grad = max(worst_grad, ref.gap(x["logp"].grad, grad))
        assert clipped.dtype == torch.bool and ref.gap(clipped, cut) == 0
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        quadrants |= {(a > 0, bool(c)) for a, c in zip(sum(exact["adv"], []), sum(cut, []), strict=True)}
    record_property("figure", worst)
    record_property("figure of the gradient", worst_grad)
    assert worst <= tol and worst_grad <= (tol if dtype != torch.bfloat16 else 2 ** -8)
    assert len(quadrants) == 4


@pytest.mark.parametrize("ratio, advantage, loss, grad, cut", [
    (1.5, 2.0, -2.4, 0.0, True), (0.5, 2.0, -1.0, -1.0, False),           # A > 0: clipped above, free below
    (0.5, -2.0, 1.6, 0.0, True), (1.5, -2.0, 3.0, 3.0, False),            # A < 0: clipped below, free above
    (1.1, 2.0, -2.2, -2.2, False), (0.9, -2.0, 1.8, 1.8, False), (1.0, 2.0, -2.0, -2.0, False),
    (1.0, -2.0, 2.0, 2.0, False), (9.0, 0.0, 0.0, 0.0, False)])
def test_surrogate_quadrants(ratio, advantage, loss, grad, cut):
    logp = torch.tensor([[math.log(ratio) - 0.75]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1)
    out, clipped = clipped_surrogate(logp, -0.75 * one, advantage * one, one)
    out.sum().backward()
    assert (out.item(), logp.grad.item()) == pytest.approx((loss, grad), abs=1e-12) and clipped.item() is cut


def test_surrogate_clip_range_is_symmetric_around_one_and_an_argument():
    old, advantage = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    logp = torch.tensor([[1.29, 1.31, 0.71, 0.69]]).log()
    out, clipped = clipped_surrogate(logp, old, advantage, torch.ones(1, 4), clip=0.3)
    assert clipped.tolist() == [[False, True, False, True]]
    assert out[0].tolist() == pytest.approx([-1.29, -1.3, 0.71, 0.7], abs=1e-6)


@pytest.mark.parametrize("sentinel", SENTINELS)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_surrogate_sentinels_reach_neither_value_nor_gradient(catalogue, sentinel, where):
    *inputs, mask = catalogue
    results = []
    for fill in (0.5, sentinel):
        x = [t.clone() for t in inputs]
        x[where][~mask] = fill
        x[0].requires_grad_()
        loss, clipped = clipped_surrogate(*x, mask)
        loss.sum().backward()
        results.append((loss, clipped, x[0].grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    loss, clipped, grad = results[1]
    assert not any(x[~mask].any() for x in (loss, clipped, grad)) and grad[mask].any()


def test_surrogate_gradient_flows_into_the_policy_only(catalogue):
    *x, mask = (t.requires_grad_() if t.is_floating_point() else t for t in catalogue)
    clipped_surrogate(*x, mask)[0].sum().backward()
    assert x[0].grad[mask].any() and not x[0].grad[~mask].any() and x[1].grad is None and x[2].grad is None


def test_surrogate_on_policy_is_the_policy_gradient(catalogue):
    logp, _, advantage, mask = catalogue
    logp.requires_grad_()
    loss, clipped = clipped_surrogate(logp, logp.detach(), advantage, mask)
    loss.sum().backward()
    assert torch.equal(loss, -advantage * mask) and torch.equal(logp.grad, loss) and not clipped.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("log_ratio, advantage, loss, grad", [
    (100.0, 1.0, -1.2, 0.0), (-100.0, -1.0, 0.8, 0.0), (-100.0, 1.0, 0.0, 0.0),
    (30.0, -1.0, math.exp(30), math.exp(30)), (100.0, -1.0, math.inf, math.inf)])
def test_surrogate_of_huge_ratios(dtype, log_ratio, advantage, loss, grad):
    """A clipped token has gradient 0 even where exp leaves fp32; one that is not clipped is neither limited
    nor dual-clipped: what it asks for stays visible."""
    logp = torch.tensor([[log_ratio, 0.25]], dtype=dtype, requires_grad=True)
    out, _ = clipped_surrogate(logp, torch.tensor([[0.0, 0.25]]), torch.tensor([[advantage, 1.0]]),
                               torch.ones(1, 2))
    out.sum().backward()
    rel = 1e-6 if dtype == torch.float32 else 2 ** -8
    assert out[0].tolist() == pytest.approx([loss, -1], rel=rel, abs=1e-12)
    assert logp.grad[0].tolist() == pytest.approx([grad, -1], rel=rel, abs=1e-12)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_surrogate_shows_a_nan_on_a_valid_token(where):
    x = [torch.full((1, 2), v) for v in (-0.5, -0.25, 1.0)]
    x[where][0, 1] = math.nan
    x[0].requires_grad_()
    loss, _ = clipped_surrogate(*x, torch.ones(1, 2))
    loss.sum().backward()
    assert torch.isnan(loss).tolist() == torch.isnan(x[0].grad).tolist() == [[False, True]]


# ------------------------------------------------------------------------------------------- k1, k2, k3
def random_kl(kind, dtype, tol, record_property):
    worst, worst_grad = 0.0, 0.0
    for seed in SEEDS:
        case = ref.ragged(seed)
        x, exact, mask = load(case, dtype)
        out = KINDS[kind](x["logp"], x["ref"], mask)
        out.sum().backward()
        value, grad = on_valid(case, lambda a, b: ref.kl(kind, a, b), exact["logp"], exact["ref"])
        worst, worst_grad = max(worst, ref.gap(out, value)), max(worst_grad, ref.gap(x["logp"].grad, grad))
        assert out.dtype == torch.promote_types(dtype, torch.float32)
    record_property("figure", worst)
    record_property("figure of the gradient", worst_grad)
    assert worst <= tol and worst_grad <= (tol if dtype != torch.bfloat16 else 2 ** -8)


@pytest.mark.parametrize("dtype, tol", PRECISIONS)
def test_k1_random_cases(dtype, tol, record_property):
    random_kl("k1", dtype, tol, record_property)


@pytest.mark.parametrize("dtype, tol", PRECISIONS)
def test_k2_random_cases(dtype, tol, record_property):
    random_kl("k2", dtype, tol, record_property)


@pytest.mark.parametrize("dtype, tol", PRECISIONS)
def test_k3_random_cases(dtype, tol, record_property):
    random_kl("k3", dtype, tol, record_property)


def sentinels(function, sentinel, where):
    mask, x = torch.tensor(CATALOGUE).bool(), [torch.full((3, 7), v) for v in (-0.5, -1.75)]
    x[where][~mask] = sentinel
    x[0].requires_grad_()
    out = function(*x, mask)
    out.sum().backward()
    assert not out[~mask].any() and not x[0].grad[~mask].any()
    return out[mask], x[0].grad[mask]


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("sentinel", SENTINELS)
def test_k1_sentinels_reach_neither_value_nor_gradient(sentinel, where):
    out, grad = sentinels(kl_k1, sentinel, where)
    assert (out == 1.25).all() and (grad == 1).all()


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("sentinel", SENTINELS)
def test_k2_sentinels_reach_neither_value_nor_gradient(sentinel, where):
    out, grad = sentinels(kl_k2, sentinel, where)
    assert (out == 0.78125).all() and (grad == 1.25).all()


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("sentinel", SENTINELS)
def test_k3_sentinels_reach_neither_value_nor_gradient(sentinel, where):
    out, grad = sentinels(kl_k3, sentinel, where)
    e = math.exp(-1.25)
    assert ref.gap(out, [e + 0.25] * 9) <= 1e-6 and ref.gap(grad, [1 - e] * 9) <= 1e-6


def huge(function, dtype, d):
    """A log-ratio d to the reference, and one of 0.5 beside it: (values, gradients)."""
    logp = torch.tensor([[d, 0.5]], dtype=dtype, requires_grad=True)
    out = function(logp, torch.zeros(1, 2), torch.ones(1, 2))
    out.sum().backward()
    return out[0].tolist(), logp.grad[0].tolist()


@pytest.mark.parametrize("d", [100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k2_of_a_huge_log_ratio_is_finite_and_unclamped(dtype, d):
    assert huge(kl_k2, dtype, d) == ([5000, 0.125], [d, 0.5])


@pytest.mark.parametrize("d", [100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k3_of_a_huge_log_ratio_is_finite(dtype, d):
    value, grad = huge(kl_k3, dtype, d)
    limited = max(-20.0, min(20.0, d))
    assert value == pytest.approx([math.expm1(-limited) + limited, math.exp(-0.5) - 0.5], rel=1e-6)
    assert grad == pytest.approx([0, 1 - math.exp(-0.5)], rel=2 ** -8)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_show_a_nan_on_a_valid_token(kind):
    out = KINDS[kind](torch.tensor([[math.nan, -0.5]]), torch.tensor([[-0.5, -1.0]]), torch.ones(1, 2))
    assert torch.isnan(out).tolist() == [[True, False]] and out[0, 1].item() == pytest.approx(
        ref.kl(kind, -0.5, -1.0)[0], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_gradient_flows_into_the_policy_only(catalogue, kind):
    logp, logp_ref, _, mask = (t.requires_grad_() if t.is_floating_point() else t for t in catalogue)
    KINDS[kind](logp, logp_ref, mask).sum().backward()
    assert logp.grad[mask].all() and not logp.grad[~mask].any() and logp_ref.grad is None


def as_loss(function):
    """Exact expectation over the three tokens of a softmax: (E_p[estimate], its gradient with p held)."""
    logits = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    logp, logp_ref = logits.log_softmax(0), torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64).log_softmax(0)
    estimate = function(logp[:, None], logp_ref[:, None], torch.ones(3, 1))[:, 0]
    loss = logp.exp().detach() @ estimate
    loss.backward()
    return loss.item(), logits.grad.tolist()


KL, KL_GRADIENT, _ = ref.softmax_kl([0.3, -0.8, 1.1], [1.0, 0.2, -0.5])


def test_k1_as_a_loss_has_no_gradient(record_property):
    value, grad = as_loss(kl_k1)
    record_property("figure", max(map(abs, grad)))
    assert value == pytest.approx(KL, abs=1e-12) and grad == pytest.approx([0, 0, 0], abs=1e-12)


def test_k2_as_a_loss_has_exactly_the_gradient_of_kl(record_property):
    value, grad = as_loss(kl_k2)
    record_property("figure", ref.gap(grad, KL_GRADIENT))
    assert ref.gap(grad, KL_GRADIENT) < 1e-12 and abs(value - KL) > 0.01  # and is biased as an estimate


def test_k3_as_a_loss_follows_another_divergence():
    value, grad = as_loss(kl_k3)
    _, reverse, _ = ref.softmax_kl([1.0, 0.2, -0.5], [0.3, -0.8, 1.1])
    p, q = (torch.tensor(z, dtype=torch.float64).softmax(0) for z in ([0.3, -0.8, 1.1], [1.0, 0.2, -0.5]))
    assert value == pytest.approx(KL, abs=1e-12) and ref.gap(grad, KL_GRADIENT) > 0.05
    assert ref.gap(grad, (p - q).tolist()) < 1e-12                               # that of KL(ref || pi)


# ------------------------------------------------------------------------------------------- response mean
@pytest.mark.parametrize("dtype, tol", PRECISIONS)
def test_mean_random_cases(dtype, tol, record_property):
    worst, worst_grad = 0.0, 0.0
    for seed in SEEDS:
        case = ref.ragged(seed)
        x, exact, mask = load(case, dtype)
        total = len(case["mask"]) + seed % 3                                     # other ranks have some, too
        out = response_mean(x["logp"], mask, total)
        out.backward()
        worst = max(worst, ref.gap(out, ref.response_mean(exact["logp"], case["mask"], total)))
        worst_grad = max(worst_grad, ref.gap(x["logp"].grad, ref.response_weights(case["mask"], total)))
        assert out.dtype == torch.promote_types(dtype, torch.float32)
    record_property("figure", worst)
    record_property("figure of the gradient", worst_grad)
    assert worst <= tol and worst_grad <= (tol if dtype != torch.bfloat16 else 2 ** -8)


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_mean_sentinels_reach_neither_value_nor_gradient(sentinel):
    mask = torch.tensor(CATALOGUE).bool()
    x = torch.where(mask, torch.arange(21.0).view(3, 7), sentinel).requires_grad_()
    out = response_mean(x, mask, 3)
    out.backward()
    assert out.item() == pytest.approx((0 + (7 + 9 + 10) / 3 + (15 + 16 + 18 + 19 + 20) / 5) / 3, abs=1e-6)
    assert ref.gap(x.grad, ref.response_weights(CATALOGUE, 3)) <= 1e-6


def test_mean_counts_a_response_without_tokens_and_its_denominator_is_global():
    """Two responses of 5 tokens with loss 1, one of them masked: 0.5 by the response mean (it counts in B),
    where a token mean says 1. One of 10 tokens with loss 3 and one of 90 with loss 1: 2, a token mean says
    1.2."""
    mask = torch.tensor([[1] * 5, [0] * 5])
    assert response_mean(torch.ones(2, 5), mask, 2).item() == 0.5
    assert response_mean(torch.ones(2, 5), mask, 8).item() == 0.125
    mask = torch.arange(90)[None] < torch.tensor([[10], [90]])
    assert response_mean(torch.tensor([[3.0], [1.0]]).expand(2, 90), mask, 2).item() == pytest.approx(2)


def test_mean_of_an_empty_part_is_a_zero_that_can_be_differentiated():
    for shape in ((0, 4), (0, 0), (2, 4)):
        x = torch.zeros(shape, requires_grad=True)
        out = response_mean(x, torch.zeros(shape), 3)
        out.backward()
        assert out.shape == () and out.item() == 0 and not x.grad.any()


@pytest.mark.parametrize("parts", [[1] * 10, [4, 6], [7, 1, 2], [9, 1], [0, 10]])
def test_mean_adds_up_over_any_partition(parts):
    """Micro-batches or ranks: values and gradients, padded to the whole or cut to their own width."""
    mask = torch.arange(7)[None] < torch.tensor([[7], [1], [0], [3], [2], [5], [1], [6], [4], [2]])
    x = torch.randn(10, 7, generator=torch.Generator().manual_seed(2)).double()
    whole = x.clone().requires_grad_()
    response_mean(whole, mask, 10).backward()
    cut, value = x.clone().requires_grad_(), 0.0
    for rows, m in zip(cut.split(parts), mask.split(parts), strict=True):
        width = int(m.sum(1).max()) if len(m) else 0
        share = response_mean(rows[:, :width], m[:, :width], 10)
        share.backward(retain_graph=True)
        value += share.item()
    assert value == pytest.approx(ref.response_mean(x.tolist(), mask.tolist(), 10), abs=1e-12)
    assert ref.gap(cut.grad, ref.response_weights(mask.tolist(), 10)) <= 1e-12
    assert torch.equal(cut.grad, whole.grad)


def test_mean_of_bf16_values_is_not_summed_in_bf16():
    out = response_mean(torch.full((3, 257), 1.0078125, dtype=torch.bfloat16), torch.ones(3, 257), 3)
    assert out.dtype == torch.float32 and out.item() == pytest.approx(1.0078125, abs=1e-6)


# -------------------------------------------------------------------- advantages and losses together
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("dtype, tol", PRECISIONS[:2])
def test_total_loss_and_gradient_of_random_cases(algo, dtype, tol, record_property):
    """What a step optimizes: advantages, clipped surrogate, k2 with coefficient 0.01 where it is a loss."""
    worst, worst_grad = 0.0, 0.0
    for seed in SEEDS:
        case = ref.ragged(seed, min_spread=True)
        x, exact, mask = load(case, dtype)
        advantage, _, _ = compute_advantages(algo, torch.tensor(case["rewards"]), mask, case["ids"],
                                             case["size"], x["old"], x["ref"], case["beta"], case["gamma"])
        coef = 0.01 if ALGORITHMS[algo].kl == "loss" else 0.0
        loss = response_mean(clipped_surrogate(x["logp"], x["old"], advantage, mask)[0], mask, len(mask))
        loss = loss + coef * response_mean(kl_k2(x["logp"], x["ref"], mask), mask, len(mask))
        loss.backward()
        expected, _, _ = ref.advantages(algo, case["rewards"], case["mask"], case["ids"], exact["old"],
                                        exact["ref"], case["beta"], case["gamma"])
        if dtype == torch.float64:
            expected = advantage.double().tolist()                # they are fp32: not a figure to 1e-9
        pg, pg_grad, _ = on_valid(case, lambda a, b, c: ref.surrogate(a, b, c, 0.2), exact["logp"],
                                  exact["old"], expected)
        k2, k2_grad = on_valid(case, lambda a, b: ref.kl("k2", a, b), exact["logp"], exact["ref"])
        weights = ref.response_weights(case["mask"], len(mask))
        both = [[a + coef * b for a, b in zip(*rows, strict=True)] for rows in zip(pg, k2, strict=True)]
        grad = [[w * (a + coef * b) for w, a, b in zip(*rows, strict=True)]
                for rows in zip(weights, pg_grad, k2_grad, strict=True)]
        worst = max(worst, ref.gap(loss, ref.response_mean(both, case["mask"], len(mask))))
        worst_grad = max(worst_grad, ref.gap(x["logp"].grad, grad))
    record_property("figure", worst)
    record_property("figure of the gradient", worst_grad)
    assert worst <= tol and worst_grad <= tol


def first_step(algo, rewards, lengths, size, logp_ref=None, kl_coef=0.01):
    """Of an on-policy step, where the ratio is 1: (pg_loss, statistics, returns, mask)."""
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    logp = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(7))
    reference = logp if logp_ref is None else logp + logp_ref
    ids = torch.arange(len(rewards)) // size
    out, returns, stats = compute_advantages(algo, rewards, mask, ids, size, logp, reference, kl_coef)
    loss, clipped = clipped_surrogate(logp, logp.clone(), out, mask)
    assert not clipped.any()
    stats = {name: float(value) for name, value in stats.items()}
    return response_mean(loss, mask, len(rewards)).item(), stats, returns, mask


def test_total_published_first_step():
    """32 responses, 27 right, 22,514 of 27,322 tokens in right ones: raw reward 0.84375, mu 0.8240246, sigma
    0.3807992, pg_loss -0.0518000 as published (no KL yet)."""
    right = torch.tensor([833] * 4 + [834] * 23)
    wrong = torch.tensor([961] * 2 + [962] * 3)
    assert (right.sum(), wrong.sum()) == (22514, 27322 - 22514)
    rewards = torch.tensor([1.0] * 27 + [0.0] * 5)
    pg_loss, stats, _, _ = first_step("reinforce_pp", rewards, torch.cat([right, wrong]), 8)
    assert rewards.mean() == 0.84375
    assert stats["adv_raw_mean"] == pytest.approx(0.8240246, abs=1e-7)
    assert stats["adv_raw_std"] == pytest.approx(0.3807992, abs=1e-7)
    assert pg_loss == pytest.approx(-0.0518000, abs=1e-6)
    assert (stats["adv_norm_mean"], stats["adv_norm_std"]) == pytest.approx((0, 1), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_total_on_policy_identities(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(2, (12,), generator=generator).double()
    rewards[:2] = torch.tensor([0.0, 1.0])
    lengths = torch.randint(1, 23, (12,), generator=generator)
    p = float((rewards * lengths).sum() / lengths.sum())
    pg_loss, stats, _, _ = first_step("grpo", rewards, lengths, 3)
    assert pg_loss == pytest.approx(0, abs=1e-6) and stats["adv_raw_std"] > 0
    pg_loss, stats, _, _ = first_step("reinforce_pp_baseline", rewards, lengths, 3)
    assert pg_loss == pytest.approx(stats["adv_raw_mean"] / stats["adv_raw_std"], abs=1e-6)
    pg_loss, stats, _, _ = first_step("reinforce_pp", rewards, lengths, 3)
    assert stats["adv_raw_std"] == pytest.approx(math.sqrt(p * (1 - p)), abs=1e-9)
    assert stats["adv_raw_mean"] == pytest.approx(p, abs=1e-9)
    assert pg_loss == pytest.approx(-(float(rewards.mean()) - p) / math.sqrt(p * (1 - p)), abs=1e-6)
    drift = 0.3 * torch.randn(12, int(lengths.max()), generator=generator)
    pg_loss, stats, returns, mask = first_step("reinforce_pp", rewards, lengths, 3, drift, 0.7)
    mean_return = response_mean(returns.double(), mask, 12).item()
    assert pg_loss == pytest.approx(-(mean_return - stats["adv_raw_mean"]) / stats["adv_raw_std"], abs=1e-6)
    assert abs(mean_return - float(rewards.mean())) > 1e-5  # the k1 term did reach the return
