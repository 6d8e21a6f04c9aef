"""Do the tests bite? Plants one known mistake at a time in a copy of the tree and runs the tests it concerns.

    python tests/mutants.py                # all, two at a time, minutes; ends with `killed N, survived M`
    python tests/mutants.py grpo floor     # those whose name holds one of the words

A mutant is (name, tests, old text, new text) of one file; `tests` is the word after test_ in the names of the
tests that must notice, or "ranks" for the real processes. Then every public function is replaced by one that
returns its input: not one of its tests may pass. Exit status 0 when nothing survived. POSIX (it forks). Not
collected by pytest.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400
FILES = {**dict.fromkeys(("surrogate", "k1", "k2", "k3", "mean"), "loss"), "ranks": "distributed"}

ADVANTAGE = [
    # ------------------------------------------------------------------------------------ shape_rewards
    ("KL raises the reward", "shape", "- kl_coef * k1, -kl_coef * k1)", "+ kl_coef * k1, kl_coef * k1)"),
    ("KL the other way round", "shape", "logp_old.detach().double() - logp_ref.detach().double()",
     "logp_ref.detach().double() - logp_old.detach().double()"),
    ("k1 clamped at 0", "shape", "logp_ref.detach().double(), 0)",
     "logp_ref.detach().double(), 0).clamp(min=0)"),
    ("k1 by its absolute value", "shape", "logp_ref.detach().double(), 0)",
     "logp_ref.detach().double(), 0).abs()"),
    ("k2 in the reward", "shape", "logp_ref.detach().double(), 0)",
     "logp_ref.detach().double(), 0).square() / 2"),
    ("k1 in float32", "shape", "logp_old.detach().double() - logp_ref.detach().double()",
     "logp_old.detach().float() - logp_ref.detach().float()"),
    ("k1 in the type of the log-probs", "shape", "logp_old.detach().double() - logp_ref.detach().double()",
     "logp_old.detach() - logp_ref.detach()"),
    ("mask as a factor", "shape",
     "torch.where(mask, logp_old.detach().double() - logp_ref.detach().double(), 0)",
     "(logp_old.detach().double() - logp_ref.detach().double()) * mask"),
    ("k1 outside the mask, too", "shape",
     "torch.where(mask, logp_old.detach().double() - logp_ref.detach().double(), 0)",
     "logp_old.detach().double() - logp_ref.detach().double()"),
    ("policy not detached", "shape", "logp_old.detach().double() -", "logp_old.double() -"),
    ("reference not detached", "shape", "- logp_ref.detach().double()", "- logp_ref.double()"),
    ("reward on the first token", "shape", "mask.flip(1).cumsum(1).flip(1) == 1", "mask.cumsum(1) == 1"),
    ("reward one token early", "shape", "mask.flip(1).cumsum(1).flip(1) == 1",
     "mask.flip(1).cumsum(1).flip(1) == 2"),
    ("reward on every token", "shape", "is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)",
     "is_last = mask"),
    ("reward on the last position", "shape", "is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)",
     "is_last = torch.arange(mask.shape[1]) == torch.full(mask.shape, mask.shape[1] - 1)"),
    ("reward also in holes before the last token", "shape", "mask & (mask.flip(1)", "(mask.flip(1)"),
    ("reward replaces the KL of the last token", "shape", "rewards.to(k1)[:, None] - kl_coef * k1, ",
     "rewards.to(k1)[:, None], "),
    # ------------------------------------------------------------------------------- discounted_returns
    ("gamma skips holes", "returns", "running = reward[:, t] + gamma * running",
     "running = torch.where(mask[:, t], reward[:, t] + gamma * running, running)"),
    ("return restarts at a hole", "returns", "running = reward[:, t] + gamma * running",
     "running = torch.where(mask[:, t], reward[:, t] + gamma * running, 0)"),
    ("own reward discounted", "returns", "reward[:, t] + gamma * running",
     "gamma * (reward[:, t] + running)"),
    ("no discount", "returns", "reward[:, t] + gamma * running", "reward[:, t] + running"),
    ("past instead of future rewards", "returns", "range(reward.shape[1] - 1, -1, -1)",
     "range(reward.shape[1])"),
    ("last position forgotten", "returns", "range(reward.shape[1] - 1, -1, -1)",
     "range(reward.shape[1] - 2, -1, -1)"),
    ("shift: own reward left out", "returns",
     "        running = reward[:, t] + gamma * running\n        returns[:, t] = running\n",
     "        returns[:, t] = running\n        running = reward[:, t] + gamma * running\n"),
    ("returns outside the mask", "returns", "return torch.where(mask, returns, 0)", "return returns"),
    ("rewards outside the mask enter", "returns", "torch.where(mask, token_rewards, 0).double()",
     "token_rewards.double()"),
    ("mask as a factor of the reward", "returns", "torch.where(mask, token_rewards, 0).double()",
     "token_rewards.double() * mask"),
    ("returns in the type of the reward", "returns", "torch.where(mask, token_rewards, 0).double()",
     "torch.where(mask, token_rewards, 0)"),
    ("needs a first position", "returns", "reward.new_zeros(reward.shape[0])",
     "torch.zeros_like(reward[:, 0])"),
    # --------------------------------------------------------------------------------- group_advantages
    ("leave-one-out mean", "group", "centred = x - _exact_mean(x, x.numel())",
     "centred = (x - _exact_mean(x, x.numel())) * x.numel() / max(x.numel() - 1, 1)"),
    ("sign of the centre", "group", "centred = x - _exact_mean(x, x.numel())",
     "centred = _exact_mean(x, x.numel()) - x"),
    ("median", "group", "_exact_mean(x, x.numel())", "x.median()"),
    ("mean over K whatever is valid", "group", "_exact_mean(x, x.numel())", "_exact_mean(x, group_size)"),
    ("plain mean", "group", "_exact_mean(x, x.numel())", "x.mean()"),
    ("ddof 0", "group", "max(x.numel() - 1, 1)", "x.numel()"),
    ("a lone valid row divides by 0", "group", "max(x.numel() - 1, 1)", "(x.numel() - 1)"),
    ("std over the whole K", "group", "max(x.numel() - 1, 1)", "(group_size - 1)"),
    ("std around 0", "group", "(centred.square().sum()", "(x.square().sum()"),
    ("epsilon inside the root", "group", ")).sqrt() + 1e-6)", ") + 1e-6).sqrt())"),
    ("epsilon 1e-8", "group", ".sqrt() + 1e-6)", ".sqrt() + 1e-8)"),
    ("epsilon 1e-4", "group", ".sqrt() + 1e-6)", ".sqrt() + 1e-4)"),
    ("no epsilon", "group", ".sqrt() + 1e-6)", ".sqrt())"),
    ("variance instead of std", "group", ")).sqrt() + 1e-6)", ")) + 1e-6)"),
    ("std not asked for", "group", "if divide_by_std:", "if True:"),
    ("std never", "group", "if divide_by_std:", "if False:"),
    ("group statistics in float32", "group", "torch.as_tensor(rewards).double()",
     "torch.as_tensor(rewards).float()"),
    ("one group for all", "group", "members = group_ids == group\n",
     "members = torch.ones_like(group_ids, dtype=torch.bool)\n        group_size = len(members)\n"),
    ("groups by position", "group", "group_ids, reward = torch.as_tensor(group_ids),",
     "group_ids, reward = torch.arange(len(rewards)) // group_size,"),
    ("only the first group", "group", "        out[members] = centred\n",
     "        out[members] = centred\n        break\n"),
    ("invalid rows count", "group", "members &= valid.bool()", "members &= True"),
    ("valid rows inverted", "group", "members &= valid.bool()", "members &= ~valid.bool()"),
    ("K = 1 accepted", "group", "group_size < 2", "group_size < 1"),
    ("K = 2 refused", "group", "group_size < 2", "group_size < 3"),
    ("incomplete groups accepted", "group", "group < 0 or members.sum() != group_size", "group < 0"),
    ("groups too large accepted", "group", "members.sum() != group_size", "members.sum() < group_size"),
    ("negative ids accepted", "group", "group < 0 or members", "members"),
    ("no ids: one group", "group",
     'raise ValueError("group ids are missing: every response must carry the row of its prompt")',
     "group_ids = torch.zeros(len(rewards))"),
    # ----------------------------------------------------------------------------------- global_moments
    ("global ddof 1", "moments", ".square().sum())[0] / divisor",
     ".square().sum())[0] / (divisor - 1).clamp(min=1)"),
    ("one pass", "moments", "_all_sum(torch.where(mask, x - mean, 0).square().sum())[0] / divisor",
     "_all_sum(x.square().sum())[0] / divisor - mean ** 2"),
    ("moments in float32", "moments", "torch.where(mask, x, 0).double()  ",
     "torch.where(mask, x, 0).float()  "),
    ("padding in the variance", "moments", "torch.where(mask, x - mean, 0).square()", "(x - mean).square()"),
    ("padding in the count", "moments", "mask.sum().double()", "torch.tensor(float(mask.numel())).double()"),
    ("padding in the correction of the mean", "moments", "torch.where(mask, x - mean, 0).sum()",
     "(x - mean).sum()"),
    ("mask as a factor of x", "normalize", "torch.where(mask, x, 0).double()  ", "(x * mask).double()  "),
    ("mean of response means", "moments", "_all_sum(mask.sum().double(), x.sum())",
     "_all_sum(mask.any(1).sum().double(), (x.sum(1) / mask.sum(1).clamp(min=1)).sum())"),
    ("mean not corrected", "normalize",
     "    mean = mean + _all_sum(torch.where(mask, x - mean, 0).sum())[0] / divisor", "    "),
    ("std for variance", "moments", "return count, mean, var", "return count, mean, var.sqrt()"),
    ("empty mask accepted", "normalize", "elif count == 0:", "elif False:"),
    ("one token refused", "normalize", "elif count == 0:", "elif count <= 1:"),
    ("no reduction over ranks", "ranks", "dist.all_reduce(total, op=dist.ReduceOp.SUM)", "pass"),
    ("maximum over ranks", "ranks", "op=dist.ReduceOp.SUM", "op=dist.ReduceOp.MAX"),
    ("ranks averaged", "ranks", "    return total.unbind()",
     "        total = total / dist.get_world_size()\n    return total.unbind()"),
    ("reduction in float32", "ranks", "total = torch.stack(values)", "total = torch.stack(values).float()"),
    ("local count", "ranks", "count, total = _all_sum(mask.sum().double(), x.sum())",
     "count, total = mask.sum().double(), _all_sum(x.sum())[0]"),
    ("local mean", "ranks", "mean = total / divisor\n", "mean = x.sum() / mask.sum().clamp(min=1)\n"),
    ("local variance", "ranks", "_all_sum(torch.where(mask, x - mean, 0).square().sum())[0] / divisor",
     "torch.where(mask, x - mean, 0).square().sum() / mask.sum().clamp(min=1)"),
    ("local variances added, no spread between ranks", "ranks",
     "torch.where(mask, x - mean, 0).square().sum())[0]",
     "torch.where(mask, x - x.sum() / mask.sum().clamp(min=1), 0).square().sum())[0]"),
    ("empty rank skips the collective", "ranks", "if dist.is_available() and dist.is_initialized():",
     "if dist.is_initialized() and values[0] != 0:"),
    ("empty rank raises alone", "ranks", "elif count == 0:", "elif not mask.any():"),
    # --------------------------------------------------------------------------------- normalize_global
    ("no floor", "normalize", "var.clamp(min=1e-8).rsqrt()", "var.rsqrt()"),
    ("floor on the std", "normalize", "var.clamp(min=1e-8).rsqrt()",
     "var.sqrt().clamp(min=1e-8).reciprocal()"),
    ("floor added", "normalize", "var.clamp(min=1e-8).rsqrt()", "(var + 1e-8).rsqrt()"),
    ("epsilon on the std", "normalize", "var.clamp(min=1e-8).rsqrt()", "(var.sqrt() + 1e-8).reciprocal()"),
    ("floor 1e-12", "normalize", "clamp(min=1e-8)", "clamp(min=1e-12)"),
    ("floor 1e-6", "normalize", "clamp(min=1e-8)", "clamp(min=1e-6)"),
    ("divided by the variance", "normalize", "clamp(min=1e-8).rsqrt()", "clamp(min=1e-8).reciprocal()"),
    ("not centred", "normalize", "(torch.where(mask, x, 0).double() - mean) *",
     "torch.where(mask, x, 0).double() *"),
    ("not scaled", "normalize", "- mean) * var.clamp(min=1e-8).rsqrt()", "- mean)"),
    ("normalized in float32", "normalize", "(torch.where(mask, x, 0).double() - mean)",
     "(torch.where(mask, x, 0).float() - mean.float())"),
    ("padding not zero", "normalize", "torch.where(mask, out, 0).to(x.dtype)", "out.to(x.dtype)"),
    ("always float32", "normalize", "torch.where(mask, out, 0).to(x.dtype)",
     "torch.where(mask, out, 0).float()"),
    ("std = 1 by definition", "normalize", '"adv_norm_std": norm_var.sqrt()',
     '"adv_norm_std": torch.ones_like(var)'),
    ("mean = 0 by definition", "normalize", '"adv_norm_mean": norm_mean',
     '"adv_norm_mean": torch.zeros_like(var)'),
    ("normalized std from the raw variance", "normalize", '"adv_norm_std": norm_var.sqrt()',
     '"adv_norm_std": (var / var).nan_to_num(0)'),
    ("raw variance for the raw std", "normalize", '"adv_raw_std": var.sqrt()', '"adv_raw_std": var'),
    ("normalized moments for the raw ones", "normalize", "count, mean, var = raw_moments",
     "count, mean, var = global_moments(out, mask)"),
    # ------------------------------------------------------------------------------- compute_advantages
    ("grpo over the whole batch", "advantages", "group_std=True, global_norm=False",
     "group_std=True, global_norm=True"),
    ("grpo without the group std", "advantages", "grouped=True, group_std=True",
     "grouped=True, group_std=False"),
    ("baseline not normalized", "advantages", "group_std=False, global_norm=True, kl=\"loss\"",
     "group_std=False, global_norm=False, kl=\"loss\""),
    ("reinforce_pp not normalized", "advantages", "global_norm=True, kl=\"reward\"",
     "global_norm=False, kl=\"reward\""),
    ("reinforce_pp with a group mean", "advantages", "grouped=False", "grouped=True"),
    ("KL of reinforce_pp as a loss", "table", 'kl="reward"', 'kl="loss"'),
    ("alias of the other one", "advantages", '"reinforce_plus_plus": "reinforce_pp"',
     '"reinforce_plus_plus": "reinforce_pp_baseline"'),
    ("unknown names run grpo", "advantages", "if algorithm is None:",
     "if algorithm is None and algo != algo:"),
    ("baseline also divided by the group std", "advantages", "group_size, valid=valid)[:, None]",
     "group_size, algorithm.global_norm, valid)[:, None]"),
    ("token KL enters the baseline", "advantages", "valid=valid)[:, None].expand(mask.shape)",
     "valid=valid)[:, None].expand(mask.shape)\n"
     "        raw = raw if logp_old is None else raw - kl_coef * (logp_old - logp_ref).double()"),
    ("batch mean on top of the group mean", "advantages",
     "raw = group_advantages(rewards, group_ids, group_size,",
     "raw = rewards.mean() + group_advantages(rewards, group_ids, group_size,"),
    ("a row without tokens counts in the group", "advantages", "valid = mask.any(dim=1)  ",
     "valid = torch.ones(len(mask))  "),
    ("rows count by their first token", "advantages", "valid = mask.any(dim=1)  ", "valid = mask[:, 0]  "),
    ("grpo outside the mask", "advantages", "out = torch.where(mask, out[:, None], 0)",
     "out = out[:, None].expand(mask.shape)"),
    ("normalized per response", "advantages", "out, stats = normalize_global(raw, mask)",
     "out, stats = normalize_global(raw, mask)\n"
     "        out = torch.where(mask, normalize_global(raw[:, :1], mask.any(1)[:, None])[0], 0)"),
    ("normalized twice", "advantages", "out, stats = normalize_global(raw, mask)",
     "out, stats = normalize_global(normalize_global(raw, mask)[0], mask)"),
    ("token rewards whitened before the return", "advantages",
     "raw = discounted_returns(token_rewards, mask, gamma)",
     "raw = discounted_returns(normalize_global(token_rewards, mask)[0], mask, gamma)"),
    ("gamma ignored", "advantages", "discounted_returns(token_rewards, mask, gamma)",
     "discounted_returns(token_rewards, mask)"),
    ("KL coefficient ignored", "advantages", "logp_ref.to(work), mask, kl_coef)",
     "logp_ref.to(work), mask, 0.0)"),
    ("old and reference swapped", "advantages", "logp_old.to(work), logp_ref.to(work)",
     "logp_ref.to(work), logp_old.to(work)"),
    ("missing log-probs not noticed", "advantages", "if logp_old is None or logp_ref is None:", "if False:"),
    ("returns rounded to float32 before the normalizer", "advantages",
     "raw = discounted_returns(token_rewards, mask, gamma)",
     "raw = discounted_returns(token_rewards.float(), mask, gamma).float()"),
    ("returns not handed out", "advantages", "returns = raw.float().to(device)", "pass"),
    ("normalized returns handed out", "advantages", "returns = raw.float().to(device)",
     "returns = normalize_global(raw, mask)[0].float()"),
    ("statistics of the output for the raw ones", "advantages",
     "statistics(global_moments(raw, mask), out, mask)",
     "statistics(global_moments(out, mask), out, mask)"),
    ("advantages in float64", "advantages", "return out.float().to(device)", "return out.to(device)"),
    ("advantages in bf16", "advantages", "return out.float().to(device)",
     "return out.bfloat16().float().to(device)"),
]

LOSS = [
    # -------------------------------------------------------------------------------- clipped_surrogate
    ("mask not applied", "surrogate", "torch.where(mask.bool(), a.to(dtype) - b.detach().to(dtype), 0)",
     "a.to(dtype) - b.detach().to(dtype)"),
    ("mask as a factor", "surrogate", "torch.where(mask.bool(), a.to(dtype) - b.detach().to(dtype), 0)",
     "(a.to(dtype) - b.detach().to(dtype)) * mask"),
    ("where after exp", "surrogate", "    log_ratio = _difference(logp, logp_old, mask)\n",
     "    log_ratio = torch.where(mask.bool(), torch.exp(logp.float() - logp_old.float()), 1).log()\n"),
    ("ratio in the type of the log-probs", "surrogate",
     "torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)",
     "torch.promote_types(a.dtype, b.dtype)"),
    ("ratio always in float32", "surrogate",
     "torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)", "torch.float32"),
    ("ratio inverted", "surrogate", "a.to(dtype) - b.detach().to(dtype), 0)",
     "b.detach().to(dtype) - a.to(dtype), 0)"),
    ("old log-probs with gradient", "surrogate", "b.detach().to(dtype)", "b.to(dtype)"),
    ("advantages with gradient", "surrogate", "advantages.detach()", "advantages"),
    ("advantages outside the mask", "surrogate", "torch.where(mask.bool(), advantages.detach(), 0)",
     "advantages.detach()"),
    ("advantages times the mask", "surrogate", "torch.where(mask.bool(), advantages.detach(), 0)",
     "(advantages.detach() * mask)"),
    ("gradient ascent", "surrogate", "torch.where(mask.bool(), advantages.detach(), 0)",
     "-torch.where(mask.bool(), advantages.detach(), 0)"),
    ("smaller of the two", "surrogate", "clipped = limited > -ratio * advantage",
     "clipped = limited < -ratio * advantage"),
    ("ties count as clipped", "surrogate", "clipped = limited > -ratio * advantage",
     "clipped = limited >= -ratio * advantage"),
    ("clipped whatever the sign of A", "surrogate", "clipped = limited > -ratio * advantage",
     "clipped = (ratio - 1).abs() > clip"),
    ("never clipped", "surrogate", "clipped = limited > -ratio * advantage",
     "clipped = torch.zeros_like(limited, dtype=torch.bool)"),
    ("clipped above only", "surrogate", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(max=1 + clip)"),
    ("clipped below only", "surrogate", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(min=1 - clip)"),
    ("clip range of log-ratios", "surrogate", "ratio.clamp(1 - clip, 1 + clip)",
     "log_ratio.detach().clamp(-clip, clip).exp()"),
    ("clip range always 0.2", "surrogate", "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(0.8, 1.2)"),
    ("upper bound 1 / (1 - clip)", "surrogate", "ratio.clamp(1 - clip, 1 + clip)",
     "ratio.clamp(1 - clip, 1 / (1 - clip))"),
    ("log-ratio clamped", "surrogate", "log_ratio = _difference(logp, logp_old, mask)",
     "log_ratio = _difference(logp, logp_old, mask).clamp(-20, 20)"),
    ("dual clip", "surrogate", "return torch.where(clipped, limited, -kept * advantage), clipped",
     "return torch.where(clipped, limited, torch.minimum(-kept * advantage, 3 * advantage.abs())), clipped"),
    ("NaN swallowed", "surrogate", "return torch.where(clipped, limited, -kept * advantage), clipped",
     "return torch.where(clipped, limited, -kept * advantage).nan_to_num(0), clipped"),
    ("first order of the ratio", "surrogate", "kept = torch.exp(torch.where(clipped, 0, log_ratio))",
     "kept = 1 + torch.where(clipped, 0, log_ratio)"),
    ("exp of clipped tokens", "surrogate", "torch.exp(torch.where(clipped, 0, log_ratio))",
     "torch.exp(log_ratio)"),
    ("no gradient at all", "surrogate", "torch.exp(torch.where(clipped, 0, log_ratio))", "ratio"),
    ("gradient of clipped tokens kept", "surrogate",
     "return torch.where(clipped, limited, -kept * advantage), clipped",
     "kept = torch.exp(log_ratio)\n    return torch.where(clipped, limited + (ratio - kept) * advantage, "
     "-kept * advantage), clipped"),
    ("gradient without the ratio", "surrogate",
     "return torch.where(clipped, limited, -kept * advantage), clipped",
     "kept = ratio + log_ratio - log_ratio.detach()\n"
     "    return torch.where(clipped, limited, -kept * advantage), clipped"),
    # -------------------------------------------------------------------------------------- k1, k2, k3
    ("k1 reversed", "k1", "return _difference(logp, logp_ref, mask)",
     "return -_difference(logp, logp_ref, mask)"),
    ("k1 without sign", "k1", "return _difference(logp, logp_ref, mask)",
     "return _difference(logp, logp_ref, mask).abs()"),
    ("k1 without gradient", "k1", "return _difference(logp, logp_ref, mask)",
     "return _difference(logp.detach(), logp_ref, mask) + 0 * logp"),
    ("k1 outside the mask", "k1", "torch.where(mask.bool(), a.to(dtype) - b.detach().to(dtype), 0)",
     "a.to(dtype) - b.detach().to(dtype)"),
    ("k2 without the half", "k2", "0.5 * _difference(logp, logp_ref, mask).square()",
     "_difference(logp, logp_ref, mask).square()"),
    ("k2 not squared", "k2", "0.5 * _difference(logp, logp_ref, mask).square()",
     "0.5 * _difference(logp, logp_ref, mask).abs()"),
    ("k2 without gradient", "k2", "0.5 * _difference(logp, logp_ref, mask)",
     "0.5 * _difference(logp.detach() + 0 * logp, logp_ref, mask)"),
    ("k2 clamped", "k2", "0.5 * _difference(logp, logp_ref, mask).square()",
     "0.5 * _difference(logp, logp_ref, mask).clamp(-20, 20).square()"),
    ("k2 swallows NaN", "k2", "0.5 * _difference(logp, logp_ref, mask)",
     "0.5 * _difference(logp, logp_ref, mask).nan_to_num(0)"),
    ("k2 pulls the reference, too", "k2", "b.detach().to(dtype)", "b.to(dtype)"),
    ("k2 outside the mask", "k2", "torch.where(mask.bool(), a.to(dtype) - b.detach().to(dtype), 0)",
     "a.to(dtype) - b.detach().to(dtype)"),
    ("k2 in bf16", "k2", "torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)",
     "torch.promote_types(a.dtype, b.dtype)"),
    ("k3 with the ratio inverted", "k3", "torch.expm1(-d) + d", "torch.expm1(d) - d"),
    ("k3 without its linear term", "k3", "torch.expm1(-d) + d", "torch.expm1(-d)"),
    ("k3 without the -1", "k3", "torch.expm1(-d) + d", "torch.exp(-d) + d"),
    ("k3 overflows", "k3", ".clamp(-20, 20)\n", "\n"),
    ("k3 limited to 1", "k3", ".clamp(-20, 20)\n", ".clamp(-1, 1)\n"),
    # ----------------------------------------------------------------------------------- response_mean
    ("token mean", "mean", "return (x.sum(dim=1) / lengths).sum() / total_responses",
     "return x.sum() / mask.sum().clamp(min=1)"),
    ("micro-batch mean", "mean", ".sum() / total_responses", ".sum() / max(len(x), 1)"),
    ("mean over responses with tokens", "mean", ".sum() / total_responses",
     ".sum() / mask.any(1).sum().clamp(min=1)"),
    ("sum over responses", "mean", ".sum() / total_responses", ".sum()"),
    ("padded length", "mean", "lengths = mask.sum(dim=1).clamp(min=1)", "lengths = max(mask.shape[1], 1)"),
    ("longest length", "mean", "lengths = mask.sum(dim=1).clamp(min=1)",
     "lengths = mask.sum(dim=1).amax().clamp(min=1)"),
    ("length + 1", "mean", "mask.sum(dim=1).clamp(min=1)", "mask.sum(dim=1) + 1"),
    ("division by 0", "mean", "mask.sum(dim=1).clamp(min=1)", "mask.sum(dim=1)"),
    ("length by position, not by mask", "mean", "mask.sum(dim=1).clamp(min=1)",
     "(mask * torch.arange(1, mask.shape[1] + 1)).sum(dim=1).clamp(min=1)"),
    ("tokens outside the mask", "mean", "x = torch.where(mask, x, 0).to(", "x = x.to("),
    ("mask as a factor of the loss", "mean", "x = torch.where(mask, x, 0).to(", "x = (x * mask).to("),
    ("sum in bf16", "mean", ".to(torch.promote_types(x.dtype, torch.float32))", ""),
    ("sum always in float32", "mean", ".to(torch.promote_types(x.dtype, torch.float32))", ".float()"),
    ("mean without gradient", "mean", "x = torch.where(mask, x, 0)",
     "x = torch.where(mask, x.detach(), 0 * x)"),
]

# Not counted: no test can tell them from the original, for the reason given.
EQUIVALENT = [
    ("advantage.py", "(torch.where(mask, x, 0).double() - mean)", "(x.double() - mean)",
     "the outer where selects the same elements and the arithmetic in between is linear, so that neither "
     "value nor gradient can differ; the inner one keeps to the rule 'select before any arithmetic'"),
    ("advantage.py", "divisor = count.clamp(min=1) ", "divisor = count ",
     "on the CPU an empty mask raises one line above; on CUDA the assertion stops the program, and the "
     "finite denominator only keeps what is computed in between from being NaN"),
    ("advantage.py", "        if not members.any():\n            continue\n", "",
     "an empty selection has mean 0/0 = NaN, and assigns nothing"),
    ("advantage.py", "logp_old.to(work), logp_ref.to(work)", "logp_old, logp_ref",
     "a transfer that only happens on Apple GPUs, where test_advantages_on_mps runs"),
]

# The function does nothing: it returns its input. Its tests, by the word after test_, must all notice.
NOTHING = ("dict.fromkeys(('valid_tokens', 'adv_raw_mean', 'adv_raw_std', 'adv_norm_mean', 'adv_norm_std'), "
           "torch.zeros((), dtype=torch.float64))")
IDENTITIES = [
    ("advantage.py", "shape", "def shape_rewards(rewards, logp_old, *others):\n    return logp_old"),
    ("advantage.py", "returns", "def discounted_returns(token_rewards, *others):\n    return token_rewards"),
    ("advantage.py", "group",
     "def group_advantages(rewards, *others, **more):\n    return torch.as_tensor(rewards)"),
    ("advantage.py", "moments", "def global_moments(x, mask):\n    return x"),
    ("advantage.py", "normalize", f"def normalize_global(x, mask):\n    return x, {NOTHING}"),
    ("advantage.py", "advantages",
     "def compute_advantages(algo, rewards, mask, ids=None, size=1, logp_old=None, *others, **more):\n"
     f"    return torch.as_tensor(rewards)[:, None].expand(mask.shape).float(), logp_old, {NOTHING}"),
    ("loss.py", "surrogate",
     "def clipped_surrogate(logp, *others, **more):\n    return logp, logp > torch.inf"),
    ("loss.py", "k1", "def kl_k1(logp, logp_ref, mask):\n    return logp"),
    ("loss.py", "k2", "def kl_k2(logp, logp_ref, mask):\n    return logp"),
    ("loss.py", "k3", "def kl_k3(logp, logp_ref, mask):\n    return logp"),
    ("loss.py", "mean", "def response_mean(x, mask, total_responses):\n    return x"),
]


def selection(tests):
    """Arguments of pytest for the word of a mutant."""
    path = f"tests/test_{FILES.get(tests, 'advantage')}.py"
    word = {"ranks": "test_normalize or test_advantages or test_reductions"}.get(tests, f"test_{tests}")
    if tests in ("k1", "k2", "k3"):
        word += f" or test_kinds and {tests}"
    return [path, "-k", f"({word}) and not cuda and not mps"]


class Outcomes:
    """pytest plugin: names of the tests that passed, and of those that did not."""

    def __init__(self):
        self.passed, self.failed = [], []

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.failed.append(name)
        elif report.when == "call" and report.passed:
            self.passed.append(name)


def child(changes, arguments, report):
    """In a forked process: copy the tree, change it, run pytest there, write down what happened."""
    import pytest
    signal.alarm(TIMEOUT_S)
    tree = Path(tempfile.mkdtemp(prefix="mutant"))
    (tree / "tests").mkdir()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"), ROOT / "pyproject.toml"]:
        shutil.copyfile(path, tree / path.relative_to(ROOT))
    for file, change in changes.items():
        (tree / file).write_text(change((tree / file).read_text(encoding="utf-8")), encoding="utf-8")
    os.chdir(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if ROOT not in (Path(p), Path(p).parent) and p)]
    log = os.open(report + ".log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    outcomes = Outcomes()
    status = int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments], plugins=[outcomes]))
    Path(report).write_text(json.dumps([status, outcomes.passed, outcomes.failed]), encoding="utf-8")
    shutil.rmtree(tree, ignore_errors=True)


def replace_once(old, new):
    def change(text):
        if text.count(old) != 1:
            raise SystemExit(f"{text.count(old)} places instead of 1 hold: {old}")
        return text.replace(old, new)
    return change


def run_all(jobs, judge):
    """jobs: (label, {file: change}, pytest arguments), two forked processes at a time; judge counts them."""
    import torch  # noqa: F401  once, for all children
    jobs, running, folder = list(jobs), {}, tempfile.mkdtemp(prefix="mutants")
    while jobs or running:
        while jobs and len(running) < 2:
            label, changes, arguments = jobs.pop(0)
            report = os.path.join(folder, str(len(os.listdir(folder))) + "-" + str(len(jobs)))
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    child(changes, arguments, report)
                    code = 0
                finally:
                    os._exit(code)
            running[pid] = label, report
        pid, status = os.wait()
        label, report = running.pop(pid)
        if os.path.exists(report):
            judge(label, *json.loads(Path(report).read_text(encoding="utf-8")))
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            judge(label, 1, [], [f"no end within {TIMEOUT_S} s"])
        else:
            raise SystemExit(f"{label}: {Path(report + '.log').read_text(encoding='utf-8')[-2000:]}")
    shutil.rmtree(folder, ignore_errors=True)


def main(words):
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    mutants = [(file, *m) for file, group in (("advantage.py", ADVANTAGE), ("loss.py", LOSS)) for m in group]
    for file, _, _, old, new in [*mutants, *((f, "", "", old, new) for f, old, new, _ in EQUIVALENT)]:
        compile(replace_once(old, new)((ROOT / file).read_text(encoding="utf-8")), file, "exec")
    chosen = [m for m in mutants if not words or any(w in f"{m[0]} {m[1]} {m[2]}" for w in words)]
    counts = {"killed": 0, "survived": 0}

    def control(label, status, passed, failed):
        if status or not passed:
            raise SystemExit(f"{label}: the tests fail without any mutant ({failed[:1]}, status {status})")
        print(f"control   {label}: {len(passed)} tests pass", flush=True)

    def judge(label, status, passed, failed):
        if status not in (0, 1):
            raise SystemExit(f"{label}: pytest ended with status {status}")
        counts["killed" if failed else "survived"] += 1
        print(f"killed    {label}  <- {failed[0]}" if failed else f"SURVIVED  {label}", flush=True)

    def judge_identity(label, status, passed, failed):
        counts["killed" if failed and not passed else "survived"] += 1
        print(f"{'SURVIVED' if passed or not failed else 'killed  '}  {label}: {len(failed)} tests fail, "
              f"{len(passed)} pass {passed}", flush=True)

    run_all([(word, {}, selection(word)) for word in sorted({m[2] for m in chosen})], control)
    run_all([(f"{file} {tests}: {name}", {file: replace_once(old, new)}, ["-x", *selection(tests)])
             for file, name, tests, old, new in chosen], judge)
    if not words or "identity" in words:
        run_all([(f"{file} {tests}: returns its input", {file: lambda text, code=code: f"{text}\n\n{code}\n"},
                  selection(tests)) for file, tests, code in IDENTITIES], judge_identity)
    print(f"equivalent, not counted: {len(EQUIVALENT)}")
    print(f"killed {counts['killed']}, survived {counts['survived']}")
    return bool(counts["survived"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
