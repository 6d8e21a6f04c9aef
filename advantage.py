"""Advantages: which population, which ddof, which epsilon, and where the KL goes.

    algorithm              centre                 scale                       population         KL to ref.
    ---------------------  ---------------------  --------------------------  -----------------  -----------
    grpo                   group mean, own incl.  group std (ddof 1) + 1e-6   the group          k2, a loss
    reinforce_pp           mean of all tokens     std of all tokens (ddof 0)  every valid token  k1, in the
                                                  variance floored at 1e-8    of every rank      reward
    reinforce_pp_baseline  group mean, own incl.  as reinforce_pp;            as reinforce_pp    k2, a loss
                           then mean of all       no group std

In symbols, for response i and position t with mask m (1 iff the policy sampled that token):

    reinforce_pp           r_it = -beta (logp_old - logp_ref) + [t = last(i)] R_i
                           x_it = sum_{u>=t} gamma^(u-t) r_iu             (the return G_it)
    reinforce_pp_baseline  x_it = R_i - mean(R of the group)                        (token KL never enters)
    both                   A_it = (x_it - mean) * rsqrt(max(var, 1e-8)) over every (rank, i, t) with m = 1
    grpo                   A_it = (R_i - mean(group)) / (std(group) + 1e-6)

To add an algorithm: a row in ALGORITHMS and, if it shapes rewards anew, a branch in compute_advantages.
Torch only: lift this file into another project as it is. Letters: B responses of this rank, T positions.
Sources: REINFORCE++ (arXiv 2501.03262), GRPO (arXiv 2402.03300); docs/algorithms.md derives them.
"""

import dataclasses

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Algorithm:
    grouped: bool            # subtract the mean of the prompt's K responses (so K >= 2)
    group_std: bool          # divide by their ddof-1 standard deviation
    global_norm: bool        # then normalize over every valid token of every rank
    kl: str                  # "reward" (k1 inside the token reward) or "loss" (k2 as a separate term)


ALGORITHMS = {
    "grpo": Algorithm(grouped=True, group_std=True, global_norm=False, kl="loss"),
    "reinforce_pp": Algorithm(grouped=False, group_std=False, global_norm=True, kl="reward"),
    "reinforce_pp_baseline": Algorithm(grouped=True, group_std=False, global_norm=True, kl="loss"),
}
ALIASES = {"reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}


def shape_rewards(rewards, logp_old, logp_ref, mask, kl_coef):
    """Token rewards of REINFORCE++: -kl_coef * k1 on valid tokens, plus R_i at the last of them.

    rewards [B], logp_old, logp_ref, mask [B,T] -> [B,T] float64, no gradient. k1 = logp_old - logp_ref is
    signed and unclamped: drifting away from the reference lowers the return. A fully masked response gets
    nothing. float64: a return adds a thousand small terms to R, and the normalizer magnifies their rounding.
    """
    mask = mask.bool()
    k1 = torch.where(mask, logp_old.detach().double() - logp_ref.detach().double(), 0)
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)           # the only valid token from here on
    return torch.where(is_last, rewards.to(k1)[:, None] - kl_coef * k1, -kl_coef * k1)


def discounted_returns(token_rewards, mask, gamma=1.0):
    """G_it = sum_{u>=t} gamma^(u-t) r_iu, [B,T] -> [B,T] float64. Holes in the mask carry no reward and still
    cost a factor of gamma (the exponent counts positions); G is exactly 0 where the mask is 0."""
    mask = mask.bool()
    reward = torch.where(mask, token_rewards, 0).double()
    returns, running = torch.zeros_like(reward), reward.new_zeros(reward.shape[0])
    for t in range(reward.shape[1] - 1, -1, -1):
        running = reward[:, t] + gamma * running
        returns[:, t] = running
    return torch.where(mask, returns, 0)


def group_advantages(rewards, group_ids, group_size, divide_by_std=False, valid=None):
    """R_i minus the mean of its group (own reward included), optionally over the group's ddof-1 std + 1e-6.

    rewards [B]; group_ids [B], the prompt's row (groups may be interleaved; equal text or position never
    makes a group); valid [B]: rows that count (default all), the others get 0. -> [B] float64. An all-equal
    group of any value gives exactly 0. ValueError names the group: K < 2, not `group_size` rows, or no id.
    """
    if group_size < 2:
        raise ValueError(f"group size {group_size}: a group baseline needs at least 2 responses per prompt")
    if group_ids is None:
        raise ValueError("group ids are missing: every response must carry the row of its prompt")
    group_ids, reward = torch.as_tensor(group_ids), torch.as_tensor(rewards).double()
    valid = torch.ones_like(group_ids) if valid is None else torch.as_tensor(valid, device=group_ids.device)
    out = torch.zeros_like(reward)
    for group in group_ids.unique().tolist():
        members = group_ids == group
        if group < 0 or members.sum() != group_size:
            raise ValueError(f"group {group}: {int(members.sum())} responses on this rank, expected "
                             f"{group_size}{' (a negative id means: no group)' if group < 0 else ''}")
        members &= valid.bool()
        if not members.any():
            continue
        x = reward[members]
        centred = x - _exact_mean(x, x.numel())
        if divide_by_std:
            centred = centred / ((centred.square().sum() / max(x.numel() - 1, 1)).sqrt() + 1e-6)
        out[members] = centred
    return out


def _exact_mean(x, count):
    """Mean with its rounding error folded back in, so that x - mean is exactly 0 when all x are equal: the
    first residual x - mean is exact (Sterbenz), and adding its mean lands on x itself."""
    mean = x.sum() / count
    return mean + (x - mean).sum() / count


def _all_sum(*values):
    """Element-wise SUM over all ranks (the identity without a process group). Every rank calls it, always."""
    total = torch.stack(values)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total.unbind()


def global_moments(x, mask):
    """(count, mean, population variance) over every valid token of every rank: float64 scalars on x's device.

    x, mask [B,T]; this rank's part may be empty. Two-pass: a one-pass float32 variance goes negative on
    constant rewards, and averaging per-rank variances loses the spread between ranks. Three collectives that
    no rank skips. An empty mask on all ranks: ValueError on every rank; on CUDA a device-side assertion, as
    the function never waits for the device.
    """
    mask = mask.bool()
    x = torch.where(mask, x, 0).double()           # select before any arithmetic: NaN outside stays outside
    count, total = _all_sum(mask.sum().double(), x.sum())
    empty = "the mask is empty on all ranks: no valid response token to train on"
    if x.device.type == "cuda":
        torch._assert_async(count > 0, empty)
    elif count == 0:
        raise ValueError(empty)
    divisor = count.clamp(min=1)                   # finite until the assertion is noticed
    mean = total / divisor
    mean = mean + _all_sum(torch.where(mask, x - mean, 0).sum())[0] / divisor      # see _exact_mean
    var = _all_sum(torch.where(mask, x - mean, 0).square().sum())[0] / divisor
    return count, mean, var


def normalize_global(x, mask):
    """(x - mean) * rsqrt(max(var, 1e-8)) over every valid token of every rank; exactly 0 where mask is 0.

    x, mask [B,T] -> (normalized [B,T] in x's dtype, its `statistics`). A constant population, or a single
    token, gives exactly 0. Empty parts and an empty whole: see global_moments.
    """
    mask = mask.bool()
    moments = _, mean, var = global_moments(x, mask)
    out = (torch.where(mask, x, 0).double() - mean) * var.clamp(min=1e-8).rsqrt()
    out = torch.where(mask, out, 0).to(x.dtype)
    return out, statistics(moments, out, mask)


def statistics(raw_moments, out, mask):
    """0-dim float64 tensors: of the raw advantages, and of the final ones as measured on the output."""
    count, mean, var = raw_moments
    _, norm_mean, norm_var = global_moments(out, mask)
    return {"valid_tokens": count, "adv_raw_mean": mean, "adv_raw_std": var.sqrt(),
            "adv_norm_mean": norm_mean, "adv_norm_std": norm_var.sqrt()}


def compute_advantages(algo, rewards, mask, group_ids=None, group_size=1,
                       logp_old=None, logp_ref=None, kl_coef=0.0, gamma=1.0):
    """Advantages of one closed rollout batch. Every rank calls this once per rollout, with its own responses.

    rewards [B], mask [B,T], group_ids [B], logp_old and logp_ref [B,T] (reinforce_pp only) ->
    (advantages [B,T] fp32, returns [B,T] fp32 or None, `statistics`). ValueError: unknown algorithm, a
    missing input, a bad group, a mask that is empty on all ranks.
    """
    algorithm = ALGORITHMS.get(ALIASES.get(algo, algo))
    if algorithm is None:
        raise ValueError(f"unknown algorithm {algo!r}; known: {', '.join([*ALGORITHMS, *ALIASES])}")
    device = mask.device
    work = torch.device("cpu") if device.type == "mps" else device       # MPS has no float64
    mask, rewards, returns = mask.bool().to(work), torch.as_tensor(rewards).to(work), None
    if algorithm.grouped:
        valid = mask.any(dim=1)                    # a response without a valid token counts in no group mean
        raw = group_advantages(rewards, group_ids, group_size, valid=valid)[:, None].expand(mask.shape)
    else:
        if logp_old is None or logp_ref is None:
            raise ValueError(f"{algo} needs logp_old and logp_ref for the k1 term of its reward")
        token_rewards = shape_rewards(rewards, logp_old.to(work), logp_ref.to(work), mask, kl_coef)
        raw = discounted_returns(token_rewards, mask, gamma)
        returns = raw.float().to(device)
    if algorithm.global_norm:
        out, stats = normalize_global(raw, mask)
    else:
        out = group_advantages(rewards, group_ids, group_size, algorithm.group_std, valid)
        out = torch.where(mask, out[:, None], 0)
        stats = statistics(global_moments(raw, mask), out, mask)
    return out.float().to(device), returns, stats
