"""Advantages against references that share no code. The name of a test begins with the function it is about:
shape_, returns_, group_, moments_, normalize_, advantages_ (tests/mutants.py relies on it).
`docs/verification.md` has the table.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import references as ref
import torch

from advantage import (
    ALGORITHMS,
    ALIASES,
    compute_advantages,
    discounted_returns,
    global_moments,
    group_advantages,
    normalize_global,
    shape_rewards,
)

ROOT = Path(__file__).resolve().parents[1]
SEEDS = range(200)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SENTINELS = [-12345.0, math.nan, math.inf, -math.inf]
CATALOGUE = [[1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]]      # lengths 1, 3, 5
CONSTANTS = [(0.7, 3), (1 / 3, 7), (1e6, 11), (1.05, 8), (1.05, 7), (-2.3, 13)]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def load(case, dtype):
    """The case with its [B,T] values as tensors, and what these tensors hold exactly as lists."""
    tensors = {name: torch.tensor(case[name], dtype=dtype) for name in ("old", "ref", "logp", "adv")}
    exact = {name: t.double().tolist() for name, t in tensors.items()}
    return tensors, exact, torch.tensor(case["mask"]).bool(), double(case["rewards"])


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def outside(mask, x, sentinel):
    return torch.where(mask, x, torch.tensor(sentinel, dtype=x.dtype))


@pytest.fixture
def catalogue():
    mask = torch.tensor(CATALOGUE).bool()
    generator = torch.Generator().manual_seed(5)
    old, logp_ref = (-torch.rand(mask.shape, generator=generator) for _ in range(2))
    return torch.tensor([1.0, 0.0, 0.5]), old, logp_ref, mask


# ---------------------------------------------------------------------------------------- shaped reward
@pytest.mark.parametrize("dtype", DTYPES)
def test_shape_random_cases(dtype, record_property):
    worst = 0.0
    for seed in SEEDS:
        case = ref.ragged(seed)
        x, exact, mask, rewards = load(case, dtype)
        out = shape_rewards(rewards, x["old"], x["ref"], mask, case["beta"])
        expected = ref.shaped_rewards(case["rewards"], exact["old"], exact["ref"], case["mask"], case["beta"])
        worst = max(worst, ref.gap(out, expected))
    record_property("figure", worst)
    assert worst <= 1e-9


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_shape_ignores_what_is_outside_the_mask(catalogue, sentinel):
    rewards, old, logp_ref, mask = catalogue
    clean = shape_rewards(rewards, old, logp_ref, mask, 0.3)
    out = shape_rewards(rewards, outside(mask, old, sentinel), outside(mask, logp_ref, sentinel), mask, 0.3)
    assert torch.equal(out, clean) and (out[~mask] == 0).all()
    expected = ref.shaped_rewards(rewards.tolist(), old.tolist(), logp_ref.tolist(), CATALOGUE, 0.3)
    assert ref.gap(out, expected) < 1e-9


def test_shape_terminal_reward_sits_on_the_last_sampled_token():
    """The stop token is an action: three sampled tokens, the third of them the stop, then padding; a hole
    before the last token; and a response without any."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    zero = torch.zeros(mask.shape)
    out = shape_rewards(torch.tensor([7.0, -3.0, 5.0]), zero, zero, mask, 0.01)
    assert out.tolist() == [[0, 0, 7, 0, 0], [0, 0, 0, -3, 0], [0, 0, 0, 0, 0]]


def test_shape_has_no_gradient_and_a_row_without_tokens_no_reward():
    old, logp_ref = (torch.full((2, 3), x, requires_grad=True) for x in (-0.25, -0.5))
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    out = shape_rewards(torch.tensor([1.0, math.nan]), old, logp_ref, mask, 2.0)
    assert not out.requires_grad and out.tolist() == [[-0.5, 0.5, 0], [0, 0, 0]]


def test_shape_drifting_from_the_reference_lowers_the_return():
    """k1 is signed: its mean over samples of the policy is KL >= 0, and the mean token reward is -beta KL."""
    old, logp_ref, mask = torch.full((1, 2), -0.1), torch.tensor([[-0.1, -0.9]]), torch.ones(1, 2)
    token = shape_rewards(torch.ones(1), old, logp_ref, mask, 0.5)[0]
    assert token[0] == 0 and token[1].item() == pytest.approx(1 - 0.5 * 0.8)
    logits, ref_logits = [0.3, -0.8, 1.1], [1.0, 0.2, -0.5]
    value, _, p = ref.softmax_kl(logits, ref_logits)
    logp = [double([z]).log_softmax(1).T for z in (logits, ref_logits)]                         # [3,1] each
    shaped = shape_rewards(torch.zeros(3), *logp, torch.ones(3, 1), 1.0)
    assert (double(p) @ shaped[:, 0]).item() == pytest.approx(-value, abs=1e-12)


def test_shape_policy_gradient_of_k1_is_minus_the_gradient_of_kl():
    logits = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64, requires_grad=True)
    ref_logits = [1.0, 0.2, -0.5]
    _, gradient, p = ref.softmax_kl(logits.tolist(), ref_logits)
    logp = logits.log_softmax(0)
    logp_ref = double([ref_logits]).log_softmax(1).T
    shaped = shape_rewards(torch.zeros(3), logp[:, None], logp_ref, torch.ones(3, 1), 1.0)[:, 0]
    (double(p) * shaped * logp).sum().backward()
    assert ref.gap(logits.grad, [-g for g in gradient]) < 1e-12


# ---------------------------------------------------------------------------------------------- returns
@pytest.mark.parametrize("dtype", DTYPES)
def test_returns_random_cases(dtype, record_property):
    worst = 0.0
    for seed in SEEDS:
        case = ref.ragged(seed)
        x, exact, mask, _ = load(case, dtype)
        out = discounted_returns(x["adv"], mask, case["gamma"])
        worst = max(worst, ref.gap(out, ref.returns(exact["adv"], case["mask"], case["gamma"])))
    record_property("figure", worst)
    assert worst <= 1e-9


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_returns_ignore_what_is_outside_the_mask(catalogue, sentinel):
    _, x, _, mask = catalogue
    out = discounted_returns(outside(mask, x, sentinel), mask, 0.9)
    assert torch.equal(out, discounted_returns(x, mask, 0.9)) and (out[~mask] == 0).all()


def test_returns_pass_through_holes_and_pay_gamma_for_them():
    """Check value: mask 1,0,0,1, k1 = 1 everywhere, beta 1, gamma 0.9, R 0 -> -1 - 0.9^3 = -1.729."""
    mask, one = torch.tensor([[1, 0, 0, 1]]), torch.ones(1, 4)
    out = discounted_returns(shape_rewards(torch.zeros(1), one, one * 0, mask, 1.0), mask, 0.9)
    assert out[0].tolist() == pytest.approx([-1.729, 0, 0, -1], abs=1e-12)


def test_returns_of_equal_rewards_do_not_depend_on_the_length():
    mask = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])
    logp = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    out = discounted_returns(shape_rewards(torch.full((3,), 0.7), logp, logp, mask, 0.01), mask)
    assert torch.equal(out, mask * torch.tensor(0.7).double())


def test_returns_do_not_depend_on_the_padding():
    reward = torch.tensor([[0.25, -1.5, 2.0]])
    short, long = (torch.nn.functional.pad(reward, (0, n - 3), value=9.0) for n in (5, 50))
    a, b = (discounted_returns(x, torch.arange(x.shape[1])[None] < 3, 0.5) for x in (short, long))
    assert torch.equal(a[:, :3], b[:, :3]) and a[0].tolist() == [0, -0.5, 2, 0, 0] and (b[0, 3:] == 0).all()


@pytest.mark.parametrize("reward", [torch.tensor([[1, 2]]), torch.tensor([[1, 2]], dtype=torch.bfloat16)])
def test_returns_are_not_rounded_to_the_type_of_the_reward(reward):
    out = discounted_returns(reward, torch.ones(1, 2), 0.123456789)
    assert out[0].tolist() == pytest.approx([1.246913578, 2], abs=1e-12)


def test_returns_and_shaped_rewards_of_an_empty_part_are_empty():
    """A rank without a sample, or samples without a token; with the full one beside them."""
    for shape in ((0, 0), (0, 5), (3, 0), (1, 2)):
        x, rewards = torch.zeros(shape), torch.ones(shape[0])
        out = discounted_returns(shape_rewards(rewards, x, x, x + 1, 0.1), x + 1, 0.5)
        assert out.shape == shape and out.dtype == torch.float64
    assert out.tolist() == [[0.5, 1.0]]


# ----------------------------------------------------------------------------------------- group centre
@pytest.mark.parametrize("std", [False, True])
def test_group_random_cases(std, record_property):
    worst = 0.0
    for seed in SEEDS:
        case = ref.ragged(seed)
        valid = [any(m) for m in case["mask"]]
        for v in (None, valid):
            out = group_advantages(torch.tensor(case["rewards"]), case["ids"], case["size"], std, v)
            worst = max(worst, ref.gap(out, ref.grouped(case["rewards"], case["ids"], std, v)))
    record_property("figure", worst)
    assert worst <= 1e-9


def test_group_may_be_interleaved():
    out = group_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]), [1, 0, 1, 0], 2)
    assert out.tolist() == [-1, -2, 1, 2]


def test_group_is_the_row_and_its_mean_includes_the_own_reward():
    """Every group of the batch by itself: not the first only, not the whole batch, not equal text."""
    out = group_advantages(torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1]), [5, 5, 5, 5, 9, 9, 9, 9], 4)
    assert out.tolist() == [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75]
    same_text = group_advantages(torch.tensor([1.0, 0, 0, 0]), [4, 4, 5, 5], 2)
    assert same_text.tolist() == [0.5, -0.5, 0, 0]


def test_group_std_is_the_sample_one_with_its_epsilon_outside_the_root():
    out = group_advantages(double([1, 0, 2, 2e-6, 0, 4e-6]), [0, 0, 0, 1, 1, 1], 3, divide_by_std=True)
    expected = [0, -1 / (1 + 1e-6), 1 / (1 + 1e-6), 0, -2e-6 / (2e-6 + 1e-6), 2e-6 / (2e-6 + 1e-6)]
    assert out.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("value, count", CONSTANTS)
def test_group_of_equal_rewards_gives_exactly_zero(value, count, std):
    for dtype in (torch.float32, torch.float64):
        out = group_advantages(torch.full((count,), value, dtype=dtype), [3] * count, count, std)
        assert (out == 0).all()


@pytest.mark.parametrize("ids, size, names", [
    ([4], 1, "group size 1"), ([4, 4], 0, "group size 0"), (None, 2, "missing"), ([4, 4, 7], 2, "group 7"),
    ([4, 4, 4], 2, "group 4"), ([-1, -1], 2, "negative"), ([4, 4, 7, 9], 2, "group 7"),
    ([4, 4], 3, "group 4")])
def test_group_refuses_what_is_no_group(ids, size, names):
    with pytest.raises(ValueError, match=names):
        group_advantages(torch.zeros(len(ids or [0, 0])), ids, size)


@pytest.mark.parametrize("std, expected", [(False, [0.5, -0.5, 0]), (True, [0.5, -0.5, 0])])
def test_group_leaves_invalid_rows_out(std, expected):
    """Rewards 1, 0, 9, the third invalid: the baseline is 0.5. A lone valid row has no spread and gives 0."""
    out = group_advantages(torch.tensor([1.0, 0.0, 9.0]), [6, 6, 6], 3, std, torch.tensor([1, 1, 0]))
    scale = math.sqrt(0.5) + 1e-6 if std else 1
    assert out.tolist() == pytest.approx([e / scale for e in expected], abs=1e-12)
    lone = group_advantages(double([math.nan, 3, math.inf]), [6, 6, 6], 3, std, torch.tensor([0, 1, 0]))
    assert lone.tolist() == [0, 0, 0]
    with pytest.raises(TypeError):
        group_advantages(torch.zeros(2), [1, 1], 2, validity=torch.ones(2))


# ------------------------------------------------------------------------------------------- normalizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_random_cases(dtype, record_property):
    worst = 0.0
    for seed in SEEDS:
        x, exact, mask, _ = load(ref.ragged(seed), dtype)
        expected = ref.moments(ref.valid_values(exact["adv"], mask.tolist()))
        worst = max(worst, ref.gap(list(map(float, global_moments(x["adv"], mask))), expected))
    record_property("figure", worst)
    assert worst <= 1e-12


def test_moments_survive_a_large_mean():
    """One pass in float32 gives a negative variance here, two passes in float32 one that is 60 % off."""
    x = torch.tensor([[1e6 + 0.25, 1e6, 1e6 + 0.5, 1e6 + 0.25, 1e6]])
    got = list(map(float, global_moments(x, torch.ones(1, 5))))
    assert got == pytest.approx([5, 1e6 + 0.2, 0.035], rel=1e-9)


def test_moments_are_the_population_ones_of_the_valid_tokens():
    x = torch.tensor([[0.0, 0.0, 7.0], [1.0, 1.0, 7.0]])
    count, mean, var = global_moments(x, torch.tensor([[1, 1, 0]] * 2))
    assert (count, mean, var) == (4, 0.5, 0.25)


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-6), (torch.float64, 1e-9),
                                        (torch.bfloat16, 2 ** -8)])
def test_normalize_random_cases(dtype, tol, record_property):
    worst = 0.0
    for seed in SEEDS:
        x, exact, mask, _ = load(ref.ragged(seed), dtype)
        out, _ = normalize_global(x["adv"], mask)
        worst = max(worst, ref.gap(out, ref.normalized(exact["adv"], mask.tolist())))
        assert out.dtype == dtype
    record_property("figure", worst)
    assert worst <= tol


def test_normalize_two_and_two_tokens():
    out, stats = normalize_global(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2))
    assert out.tolist() == [[-1, -1], [1, 1]] and float(stats["adv_raw_std"]) == 0.5


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_normalize_ignores_what_is_outside_the_mask(catalogue, sentinel):
    _, x, _, mask = catalogue
    clean, _ = normalize_global(x, mask)
    out, stats = normalize_global(outside(mask, x, sentinel), mask)
    assert torch.equal(out, clean) and (out[~mask] == 0).all()
    assert all(torch.isfinite(v) for v in stats.values()) and stats["valid_tokens"] == 9


@pytest.mark.parametrize("value, count", [*CONSTANTS, (0.7, 1), (1e6, 1), (-1 / 3, 1)])
def test_normalize_constant_or_single_token_gives_exactly_zero(value, count):
    for dtype in (torch.float32, torch.float64):
        for copies in (1, 41):                         # 41 x count tokens: sums that do round
            x = torch.full((copies, count + 2), value, dtype=dtype)
            mask = (torch.arange(count + 2) < count).expand(copies, -1)
            out, stats = normalize_global(torch.where(mask, x, 5), mask)
            assert (out == 0).all() and stats["adv_raw_std"] == 0 and stats["adv_norm_std"] == 0


def test_normalize_floors_the_variance_not_the_deviation():
    x = torch.tensor([[1e-5, -1e-5, 3e-5, -3e-5]], dtype=torch.float64)              # variance 5e-10 < 1e-8
    out, _ = normalize_global(x, torch.ones(1, 4))
    assert out[0].tolist() == pytest.approx([0.1, -0.1, 0.3, -0.3], abs=1e-12)
    x = torch.tensor([[2e-4, -2e-4]], dtype=torch.float64)  # variance 4e-8: untouched
    assert normalize_global(x, torch.ones(1, 2))[0][0].tolist() == pytest.approx([1, -1], abs=1e-12)


def test_normalize_measures_its_mean_and_std_on_the_output():
    """Where the floor acts the std is far from 1, and in bf16 the mean is not quite 0: a figure made from the
    raw moments would show."""
    mask = torch.tensor([[1, 1, 1, 0]])
    for x, std in ((double([[1e-5, -2e-5, 4e-5, 9]]), math.sqrt(0.06)), (double([[3, -2, 0.5, 9]]), 1.0),
                   (torch.tensor([[3.0, -2.0, 0.75, 9]], dtype=torch.bfloat16), None)):
        out, stats = normalize_global(x, mask)
        _, mean, var = ref.moments(out[0, :3].tolist())
        assert float(stats["adv_norm_mean"]) == pytest.approx(float(mean), abs=1e-12)
        assert float(stats["adv_norm_std"]) == pytest.approx(math.sqrt(var), abs=1e-12)
        if std is None:
            assert abs(mean) > 1e-5 and abs(math.sqrt(var) - 1) > 1e-5
        else:
            assert float(stats["adv_norm_std"]) == pytest.approx(std, abs=1e-9)
        _, mean, var = ref.moments(x[0, :3].tolist())
        assert [float(stats[k]) for k in ("valid_tokens", "adv_raw_mean", "adv_raw_std")] == pytest.approx(
            [3, float(mean), math.sqrt(var)], abs=1e-12)


def test_normalize_shows_a_nan_on_a_valid_token():
    out, _ = normalize_global(torch.tensor([[math.nan, 1.0], [0.0, 2.0]]), torch.tensor([[1, 1], [0, 1]]))
    assert torch.isnan(out).tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (0, 0)])
def test_normalize_refuses_a_mask_that_is_empty_everywhere(shape):
    with pytest.raises(ValueError, match="mask is empty on all ranks"):
        normalize_global(torch.zeros(shape), torch.zeros(shape))


# ------------------------------------------------------------------------------------- the three algorithms
def arguments(case, x):
    return dict(group_ids=torch.tensor(case["ids"]), group_size=case["size"], logp_old=x["old"],
                logp_ref=x["ref"], kl_coef=case["beta"], gamma=case["gamma"])


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_advantages_random_cases(algo, dtype, record_property):
    worst, worst_stats = 0.0, 0.0
    for seed in SEEDS:
        case = ref.ragged(seed)
        x, exact, mask, rewards = load(case, dtype)
        expected, raw, returns = ref.advantages(algo, case["rewards"], case["mask"], case["ids"],
                                                exact["old"], exact["ref"], case["beta"], case["gamma"])
        for name in (algo, algo.replace("_pp", "_plus_plus")):
            out, got, stats = compute_advantages(name, rewards, mask, **arguments(case, x))
            worst = max(worst, ref.gap(out, expected), ref.gap(got, returns) if returns else 0.0)
            assert (got is None) == (returns is None)
            assert out.dtype == torch.float32 and not out.requires_grad
        n, mean, var = ref.moments(ref.valid_values(raw, case["mask"]))
        _, norm_mean, norm_var = ref.moments(ref.valid_values(expected, case["mask"]))
        worst_stats = max(worst_stats, ref.gap(list(map(float, stats.values())), [
            n, mean, math.sqrt(var), norm_mean, math.sqrt(norm_var)]))
        assert list(stats) == ["valid_tokens", "adv_raw_mean", "adv_raw_std", "adv_norm_mean", "adv_norm_std"]
    record_property("figure", worst)
    record_property("figure of the statistics", worst_stats)
    assert worst <= 1e-6 and worst_stats <= 1e-9


@pytest.mark.parametrize("sentinel", SENTINELS)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_advantages_ignore_what_is_outside_the_mask(algo, sentinel):
    """Log-probs outside the mask, and the reward of a response without a valid token."""
    mask = torch.tensor([*CATALOGUE, [0] * 7, [1] * 7, [0, 1, 0, 0, 0, 0, 0]]).bool()
    rewards, ids = torch.tensor([1.0, 0.0, 0.5, sentinel, 1.0, 0.0]), torch.tensor([8, 2, 8, 2, 2, 8])
    old, logp_ref = (-torch.rand(6, 7, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    clean = compute_advantages(algo, rewards.nan_to_num(0, 0, 0), mask, ids, 3, old, logp_ref, 0.3)
    out, _, stats = compute_advantages(algo, rewards, mask, ids, 3, outside(mask, old, sentinel),
                                       outside(mask, logp_ref, sentinel), 0.3)
    assert torch.equal(out, clean[0]) and stats == clean[2]
    assert (out[~mask] == 0).all() and (out[mask] != 0).any()


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_advantages_of_zero_reward_come_from_the_kl_alone(catalogue, beta):
    _, old, logp_ref, mask = catalogue
    out, returns, _ = compute_advantages("reinforce_pp", torch.zeros(3), mask, None, 1, old, logp_ref, beta)
    expected, _, expected_returns = ref.advantages("reinforce_pp", [0.0] * 3, CATALOGUE, None, old.tolist(),
                                                   logp_ref.tolist(), beta, 1.0)
    assert ref.gap(out, expected) <= 1e-6 and ref.gap(returns, expected_returns) <= 1e-6
    assert bool((out == 0).all()) is (beta == 0)
    for algo in ("grpo", "reinforce_pp_baseline"):                          # token KL never enters these
        assert (compute_advantages(algo, torch.zeros(3), mask, [1] * 3, 3, old, logp_ref, beta)[0] == 0).all()


def test_advantages_of_a_constant_reward_with_a_small_kl_are_not_rounding_noise(record_property):
    """R = 1 everywhere: the whole signal is beta k1, summed over up to 500 tokens; float32 would drown it."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(500)[None, :] < torch.tensor([[500], [499], [3]])
    old = -torch.rand(3, 500, generator=generator)
    logp_ref = old + 1e-4 * torch.randn(3, 500, generator=generator)
    out, _, _ = compute_advantages("reinforce_pp", torch.ones(3), mask, None, 1, old, logp_ref, 0.01)
    shaped = ref.shaped_rewards([1.0] * 3, old.tolist(), logp_ref.tolist(), mask.tolist(), 0.01)
    returns = []
    for row, m in zip(shaped, mask.tolist(), strict=True):
        assert sum(m) in (3, 499, 500) and not any(m[sum(m):])            # valid tokens first, then padding
        returns.append([math.fsum(row[t:sum(m)]) for t in range(500)])
    worst = ref.gap(out, ref.normalized(returns, mask.tolist()))
    record_property("figure", worst)
    assert worst <= 1e-6


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_advantages_of_one_valid_token_or_equal_rewards_are_exactly_zero(algo):
    x, one = torch.zeros(4, 3), torch.zeros(4, 3)
    one[2, 1] = 1
    out, _, stats = compute_advantages(algo, torch.tensor([1.0, 0, 1, 0]), one, [1, 1, 2, 2], 2, x, x, 0.01)
    assert (out == 0).all() and stats["valid_tokens"] == 1 and stats["adv_raw_std"] == 0
    for value, count in CONSTANTS:
        x, rewards = torch.zeros(count, 3), torch.full((count,), value)
        out, _, stats = compute_advantages(algo, rewards, x + 1, [7] * count, count, x, x, 0.01)
        assert (out == 0).all() and stats["adv_norm_std"] == 0


@pytest.mark.parametrize("algo, valid", [("grpo", [0.5, -0.5]), ("reinforce_pp_baseline", [0.5, -0.5]),
                                         ("reinforce_pp", [1.0, 0.0])])
def test_advantages_leave_a_response_without_tokens_out(algo, valid):
    """Rewards 1, 0, 9 and nothing sampled in the third: baseline 0.5; the population has four tokens."""
    mask, zero = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]), torch.zeros(3, 3)
    rewards = torch.tensor([1.0, 0.0, 9.0])
    _, _, stats = compute_advantages(algo, rewards, mask, [6, 6, 6], 3, zero, zero, 0.01)
    assert stats["valid_tokens"] == 4
    assert float(stats["adv_raw_mean"]) == pytest.approx((3 * valid[0] + valid[1]) / 4, abs=1e-12)
    with pytest.raises(TypeError):
        compute_advantages(algo, torch.zeros(3), mask, [6, 6, 6], 3, zero, zero, valid=torch.ones(3))


@pytest.mark.parametrize("algo, rows", [("grpo", 0.5 / (math.sqrt(0.5) + 1e-6)),
                                        ("reinforce_pp_baseline", math.sqrt(3))])
def test_advantages_of_groups_without_signal(algo, rows):
    """Rewards [1,1], [0,0], [1,0]: only the third group has something to say."""
    rewards = torch.tensor([1.0, 1, 0, 0, 1, 0])
    out, _, _ = compute_advantages(algo, rewards, torch.ones(6, 1), [1, 1, 2, 2, 3, 3], 2)
    assert out[:, 0].tolist() == pytest.approx([0, 0, 0, 0, rows, -rows], abs=1e-6)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_advantages_do_not_depend_on_the_padding(algo):
    mask = torch.arange(5)[None] < torch.tensor([[3], [1], [5], [2]])
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    old, logp_ref = (-torch.rand(4, 5, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    a = compute_advantages(algo, rewards, mask, [1, 1, 2, 2], 2, old, logp_ref, 0.3)
    wide = [torch.nn.functional.pad(x, (0, 45), value=v)
            for x, v in ((mask, False), (old, 4.0), (logp_ref, -4.0))]
    b = compute_advantages(algo, rewards, wide[0], [1, 1, 2, 2], 2, *wide[1:], 0.3)
    assert torch.equal(a[0], b[0][:, :5]) and (b[0][:, 5:] == 0).all()
    assert list(map(float, a[2].values())) == pytest.approx(list(map(float, b[2].values())), abs=1e-12)


@pytest.mark.parametrize("change, refused", [
    ({}, None), ({"algo": "reinforce_plus_plus_baseline"}, None), ({"algo": "grpo"}, None),
    ({"algo": "reinforce_pp"}, None), ({"algo": "reinforce_plus_plus"}, None),
    ({"algo": "reinforce_pp", "group_ids": None, "group_size": 1}, None),
    ({"logp_old": None, "logp_ref": None}, None),
    ({"algo": "grpo", "logp_old": None, "logp_ref": None}, None),
    ({"algo": "ppo"}, "unknown algorithm 'ppo'; known: grpo"), ({"algo": None}, "unknown"),
    ({"algo": "reinforce_pp", "logp_ref": None}, "logp_ref"),
    ({"algo": "reinforce_pp", "logp_old": None}, "logp_old"),
    ({"group_size": 1}, "group size 1"), ({"algo": "grpo", "group_size": 1}, "group size 1"),
    ({"group_ids": None}, "missing"), ({"algo": "grpo", "group_ids": None}, "missing"),
    ({"group_ids": [3, 3, 5, 6]}, "group 5: 1 responses"),
    ({"algo": "grpo", "group_ids": [3, 3, 3, 5]}, "group 3"), ({"group_ids": [3, 3, -1, -1]}, "negative"),
    ({"group_size": 4}, "group 3: 2 responses on this rank, expected 4"),
    ({"mask": torch.zeros(4, 3)}, "empty on all ranks"),
    ({"mask": torch.zeros(4, 3), "algo": "grpo"}, "empty"),
    ({"mask": torch.zeros(4, 3), "algo": "reinforce_pp"}, "empty")])
def test_advantages_accept_and_refuse(change, refused):
    x = torch.zeros(4, 3)
    call = {"algo": "reinforce_pp_baseline", "rewards": double([1, 0, 0, 0]), "mask": torch.ones(4, 3),
            "group_ids": [3, 3, 5, 5], "group_size": 2, "logp_old": x, "logp_ref": x, **change}
    if refused is None:
        out, returns, _ = compute_advantages(**call)
        full = call["algo"].replace("_plus_plus", "_pp")
        expected, _, expected_returns = ref.advantages(full, [1.0, 0, 0, 0], [[1] * 3] * 4, [3, 3, 5, 5],
                                                       x.tolist(), x.tolist(), 0.0, 1.0)
        assert ref.gap(out, expected) <= 1e-6 and (returns is None) == (expected_returns is None)
    else:
        with pytest.raises(ValueError, match=refused):
            compute_advantages(**call)


def test_table_is_the_contract():
    table = {name: (a.grouped, a.group_std, a.global_norm, a.kl) for name, a in ALGORITHMS.items()}
    assert table == {"grpo": (True, True, False, "loss"), "reinforce_pp": (False, False, True, "reward"),
                     "reinforce_pp_baseline": (True, False, True, "loss")}
    assert ALIASES == {"reinforce_plus_plus": "reinforce_pp",
                       "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}


# -------------------------------------------------------------------------------------------- other devices
@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_advantages_on_mps(algo):
    case = ref.ragged(4)
    x, _, mask, rewards = load(case, torch.float32)
    expected, _, _ = compute_advantages(algo, rewards, mask, **arguments(case, x))
    on = {name: t.to("mps") for name, t in x.items()}
    out, _, _ = compute_advantages(algo, rewards, mask.to("mps"), **arguments(case, on))
    assert out.device.type == "mps" and torch.allclose(out.cpu(), expected)


@needs_cuda
def test_normalize_never_waits_for_the_device():
    x, mask = torch.randn(7, 11, device="cuda"), torch.rand(7, 11, device="cuda") > 0.3
    normalize_global(x, mask)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            out, stats = normalize_global(x, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, _ = normalize_global(x.cpu(), mask.cpu())
    assert torch.allclose(out.cpu(), expected, atol=1e-6) and float(stats["adv_norm_std"]) == pytest.approx(1)


@needs_cuda
def test_normalize_asserts_on_the_device_that_the_mask_is_not_empty():
    code = ("import torch, advantage\nx = torch.zeros(2, 3, device='cuda')\n"
            "advantage.normalize_global(x, x)\ntorch.cuda.synchronize()")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode != 0 and "assert" in done.stderr.lower()


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_advantages_on_cuda_equal_those_on_the_cpu(algo, dtype):
    for seed in range(20):
        case = ref.ragged(seed)
        x, _, mask, rewards = load(case, dtype)
        expected, _, _ = compute_advantages(algo, rewards, mask, **arguments(case, x))
        on = {name: t.cuda() for name, t in x.items()}
        out, _, _ = compute_advantages(algo, rewards, mask.cuda(), **arguments(case, on))
        assert ref.gap(out.cpu(), expected.tolist()) <= 1e-6
