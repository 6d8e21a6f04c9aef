"""Losses: clipped surrogate, KL estimators, and the response mean with a global denominator.

    loss_it = max(-rho A, -clip(rho, 1 - eps, 1 + eps) A),  rho = exp(logp - logp_old)       clipped_surrogate
    k2_it   = 0.5 (logp - logp_ref)^2, with gradient                                          kl_k2
    L       = (1/B) sum_i (1/max(L_i, 1)) sum_t m_it x_it,  B = responses of ALL ranks        response_mean

Why k2 as the loss: on-policy its gradient is exactly that of KL(pi || ref); k1 as a differentiable loss has
zero expected gradient and k3 follows another divergence (docs/algorithms.md; shown on three tokens in the
tests). k1 belongs in the reward (advantage.py). The names are Schulman's ("Approximating KL divergence",
2020). Everything outside the mask is selected away before exp and before any product, so that NaN or Inf in
padding reaches neither the value nor the gradient. No dual clip, no clamp on the policy ratio: a NaN on a
valid token stays visible and stops the step. Torch only. Letters in shapes: B responses of this part
(1/B above is over ALL ranks: total_responses), T positions; mask[b,t] = 1 iff the policy sampled token t.
"""

import torch


def _difference(a, b, mask):
    """a - b on valid tokens, exactly 0 (value and gradient) elsewhere; fp32 at least; b is constant. [B,T]"""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.where(mask.bool(), a.to(dtype) - b.detach().to(dtype), 0)


def clipped_surrogate(logp, logp_old, advantages, mask, clip=0.2):
    """PPO's token loss (arXiv 1707.06347, eq. 7, negated). All [B,T] -> (loss [B,T], clipped [B,T] bool):
    `clipped` marks the tokens whose clipped term is strictly larger, that is, whose gradient is cut."""
    log_ratio = _difference(logp, logp_old, mask)
    advantage = torch.where(mask.bool(), advantages.detach(), 0).to(log_ratio.dtype)
    ratio = torch.exp(log_ratio.detach())
    limited = -ratio.clamp(1 - clip, 1 + clip) * advantage
    clipped = limited > -ratio * advantage
    kept = torch.exp(torch.where(clipped, 0, log_ratio))      # before exp: where it overflows, 0 * inf is NaN
    return torch.where(clipped, limited, -kept * advantage), clipped


def kl_k1(logp, logp_ref, mask):
    """logp - logp_ref: unbiased, signed. [B,T] -> [B,T]"""
    return _difference(logp, logp_ref, mask)


def kl_k2(logp, logp_ref, mask):
    """0.5 (logp - logp_ref)^2, unclamped; d k2 / d logp = logp - logp_ref. [B,T] -> [B,T]"""
    return 0.5 * _difference(logp, logp_ref, mask).square()


def kl_k3(logp, logp_ref, mask):
    """exp(-d) - 1 + d with d = logp - logp_ref: unbiased, never negative, for comparison only (no algorithm
    here trains on it). |d| is limited to 20, far before the exponential leaves fp32. [B,T] -> [B,T]"""
    d = _difference(logp, logp_ref, mask).clamp(-20, 20)
    return torch.expm1(-d) + d


def response_mean(x, mask, total_responses):
    """This part's share of (1/B) sum_i (1/max(L_i,1)) sum_t m_it x_it. x, mask [b,T], any part of the batch
    -> scalar, fp32 at least; shares of micro-batches and ranks add up to the mean over `total_responses` = B,
    whatever the partition. A fully masked response adds 0 and counts in B."""
    mask = mask.bool()
    lengths = mask.sum(dim=1).clamp(min=1)
    x = torch.where(mask, x, 0).to(torch.promote_types(x.dtype, torch.float32))
    return (x.sum(dim=1) / lengths).sum() / total_responses
