"""The learner: a rank's share of a rollout, its micro-batches, and updates that do not depend on the cut.

    batch = make_batch(prompts, records, device)
    logp = batch_logp(model, batch, cfg, vocab_limit)   # no gradient: reference and old log-probs
    sums = accumulate_gradients(learner, batch, rows, advantages, logp, logp_ref, total, cfg, vocab_limit)
    norm, coef, bad = optimizer_step(model, optimizer, cfg)

Micro-batches hold up to `max_tokens_per_device` tokens without padding, a prompt shared by K responses once.
The loss is a mean over the responses of all ranks (`total`), so its gradient is the same for every budget,
order and number of ranks. Gradients synchronize once per update. `learner` is the DDP-wrapped `model` under
torchrun, else the same. B responses of this rank, T positions; mask[b,t] = 1 iff the policy sampled it.
"""

import contextlib
import dataclasses
from collections import Counter

import numpy as np
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import data
import distributed
from advantage import ALGORITHMS
from loss import clipped_surrogate, kl_k1, kl_k2, response_mean
from model import pack


@dataclasses.dataclass
class Batch:
    """This rank's share of a rollout, whole groups, in prompt order."""
    prompts: list                   # id list of each group
    group: torch.Tensor             # [B] which group: index into prompts
    responses: list                 # [B] id lists as sampled, never re-encoded text
    index: list                     # [B] position in the global batch
    rewards: torch.Tensor           # [B] float64, on the CPU
    mask: torch.Tensor              # [B,T] bool
    sampler_logp: torch.Tensor      # [B,T] log-probs as the sampler saw them: compared, never trained on

    def micro_batches(self, rows, max_tokens):
        return data.micro_batches([len(p) for p in self.prompts], [len(r) for r in self.responses],
                                  self.group.tolist(), rows, max_tokens)


def make_batch(prompts, records, device):
    """records: dicts with group, index, tokens, logps, reward of this rank's responses, group by group.
    -> Batch"""
    groups = sorted({r["group"] for r in records})
    lengths = torch.tensor([len(r["tokens"]) for r in records], dtype=torch.int64)
    mask = torch.arange(max(lengths.tolist(), default=1)) < lengths[:, None]
    sampled = torch.zeros(mask.shape)
    sampled[mask] = torch.tensor([x for r in records for x in r["logps"]])
    group = torch.tensor([groups.index(r["group"]) for r in records], dtype=torch.int64)
    rewards = torch.tensor([r["reward"] for r in records], dtype=torch.float64)
    return Batch([prompts[g] for g in groups], group, [r["tokens"] for r in records],
                 [r["index"] for r in records], rewards, mask.to(device), sampled.to(device))


def forward(model, batch, rows, cfg, vocab_limit):
    """Log-probs and entropies [len(rows),T] of some rows: one packed pass of the (wrapped) model."""
    used = sorted({int(batch.group[b]) for b in rows})
    packed = pack([batch.prompts[g] for g in used], [used.index(int(batch.group[b])) for b in rows],
                  [batch.responses[b] for b in rows]).to(batch.mask.device)
    with autocast(cfg, batch.mask.device):
        logp, entropy = model(packed, cfg.temperature, vocab_limit)
    mask = batch.mask[rows]
    return tuple(x.new_zeros(mask.shape).masked_scatter(mask, x) for x in (logp, entropy))


def autocast(cfg, device):
    return torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16")


@torch.no_grad()
def batch_logp(model, batch, cfg, vocab_limit):
    """Log-probs [B,T] of the whole share, without gradient (reference, or the policy before its update)."""
    out = torch.zeros(batch.mask.shape, device=batch.mask.device)
    for rows in batch.micro_batches(range(len(batch.responses)), cfg.max_tokens_per_device):
        out[rows] = forward(model, batch, rows, cfg, vocab_limit)[0]
    return out


def accumulate_gradients(learner, batch, rows, advantages, logp_old, logp_ref, total, cfg, vocab_limit):
    """Backward passes of one update: the gradient of the mean loss over `total` responses of all ranks,
    however they are cut into micro-batches and ranks. Returns {metric: sum} on the device, this rank's share
    (train.update_metrics divides).

    logp_old None means: the policy has not moved, old log-probs are the detached current ones. DDP averages
    over ranks, so each loss is multiplied by the world size; it synchronizes once, in the last micro-batch,
    which every rank has: one without responses runs a single token with weight 0.
    """
    micro, sums = batch.micro_batches(rows, cfg.max_tokens_per_device), Counter()
    for number, part in enumerate(micro or [None]):
        wait = number + 1 < len(micro) and isinstance(learner, DistributedDataParallel)
        with learner.no_sync() if wait else contextlib.nullcontext():   # before the forward
            if part is None:
                logp, _ = learner(pack([[0]], [0], [[0]]).to(batch.mask.device), 1.0, vocab_limit)
                (logp.sum() * 0).backward()
                break
            mask = batch.mask[part]
            logp, entropy = forward(learner, batch, part, cfg, vocab_limit)
            old = logp.detach() if logp_old is None else logp_old[part]
            token_loss, clipped = clipped_surrogate(logp, old, advantages[part], mask, cfg.clip)
            loss = pg_loss = response_mean(token_loss, mask, total)
            if logp_ref is not None:
                k2 = kl_k2(logp, logp_ref[part], mask)
                sums["ref_k1"] += kl_k1(logp, logp_ref[part], mask).sum().detach()
                sums["ref_k2"] += k2.sum().detach()
                if ALGORITHMS[cfg.algo].kl == "loss":
                    kl_loss = response_mean(k2, mask, total)
                    sums["kl_loss"] += kl_loss.detach()
                    loss = pg_loss + cfg.kl_coef * kl_loss
            (loss * distributed.world_size()).backward()
        sums["pg_loss"] += pg_loss.detach()
        sums["loss"] += loss.detach()
        sums["ppo_kl"] += response_mean(kl_k1(old, logp.detach(), mask), mask, total)
        sums["clip_frac"] += clipped.sum()
        sums["entropy"] += entropy.sum()
        gap = torch.where(mask, old - batch.sampler_logp[part], 0).abs()
        sums["sampler_logp_gap_mean"] += gap.sum()
        sums["gap_max"] = torch.maximum(gap.max(), sums["gap_max"]) if "gap_max" in sums else gap.max()
    return sums


def optimizer_step(model, optimizer, cfg):
    """Clips the reduced gradient to a global L2 norm and steps. -> (norm before, coefficient applied, name of
    the first non-finite gradient, "their norm" if only that overflows, or None). A non-finite one skips the
    step (coefficient NaN) on all ranks alike: they hold the same."""
    norm, bad = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]), None
    if not torch.isfinite(norm):
        bad = next((n for n, p in model.named_parameters() if not torch.isfinite(p.grad).all()), "their norm")
    else:
        torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), cfg.grad_clip, norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm), float("nan") if bad else min(1.0, cfg.grad_clip / (float(norm) + 1e-6)), bad


def make_optimizer(model, cfg):
    """AdamW, decay on matrices only; with --zero its state is sharded over the ranks."""
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": cfg.weight_decay},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    options = {"lr": cfg.lr, "betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps, "fused": True}
    if cfg.zero and distributed.world_size() > 1:
        return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **options)
    return torch.optim.AdamW(groups, **options)


def update_minibatches(step, count, cfg):
    """Global response indices of each update of a rollout: all, or seeded mini-batches every epoch."""
    for epoch in range(cfg.epochs):
        order = np.random.default_rng([cfg.seed, step, epoch]).permutation(count)
        yield from map(set, order.reshape(cfg.updates_per_rollout, -1).tolist())
