"""The model as decoding wants it: fused, packed weights and each block in few kernels. No cache, no sampling.

`model.py` is the model; this is the same function for one-token queries, where the cost is reading weights
and starting kernels. Weights change only in `refresh`, after each optimizer step; the embedding is the
model's own. Letters in shapes: n rows, H query heads, G key/value heads, D head size, E hidden size, V vocabulary,
T cache columns. flash-attn's kernel over a cache has not run on a GPU yet.
"""

import contextlib

import torch
import torch.nn.functional as F

from model import matmul_fp32

try:
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None


def fused_weights(model, vocab_limit, chunk, dtype):
    """Yields 7 tensors a layer, the last norm, the head. q, k, v are one product, gate and up one. The rows
    of q and k are interleaved (i, i + D/2), so that the rotation is one complex product (scores do not see
    the order). Norm weights are fp32 and take in sqrt(width): the mean of squares becomes a sum."""
    c, pairs = model.config, torch.arange(model.config.head_dim).view(2, -1).T.reshape(-1)

    def rows(*parts):
        return torch.cat([part.weight for part in parts]).to(dtype)

    def norm(module):
        return module.weight.float() * len(module.weight) ** 0.5

    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        qk = rows(a.q_proj, a.k_proj).unflatten(0, (-1, c.head_dim))[:, pairs].flatten(0, 1)
        yield norm(layer.input_layernorm)                                                           # [E]
        yield torch.cat([qk, rows(a.v_proj)])                                                # [(H+2G)*D, E]
        yield torch.cat([norm(x)[pairs].expand(heads, -1) for x, heads in                          # [H+G, D]
                         ((a.q_norm, c.num_attention_heads), (a.k_norm, c.num_key_value_heads))])
        yield rows(a.o_proj)
        yield norm(layer.post_attention_layernorm)
        yield rows(m.gate_proj, m.up_proj)
        yield rows(m.down_proj)
    yield norm(model.model.norm)
    # logits are fp32 products of operands in `dtype`, as in the learner; on CPU of operands widened before
    head = F.pad(model.head_weight[:vocab_limit].to(dtype), (0, 0, 0, -vocab_limit % chunk))
    yield head if head.is_cuda else head.float()


def packed(w):
    """w in oneDNN's own layout where that pays: up to twice as fast on CPU, except for small fp32 weights."""
    if w.is_cpu and w.ndim == 2 and (w.dtype != torch.float32 or w.numel() >= 2 ** 16):
        with contextlib.suppress(AttributeError, RuntimeError):         # no such op, or not for this dtype
            return torch.ops.mkldnn._reorder_linear_weight(w, 64)
    return w


def product(x, w, residual=None):
    """x [n,in] @ w^T, plus `residual`, which may be overwritten."""
    if w.is_mkldnn:
        op = torch.ops.mkldnn._linear_pointwise
        return op(x, w, None, "none", [], "") if residual is None else op.binary(x, residual, w, None, "add")
    return F.linear(x, w) if residual is None else residual.addmm_(x, w.t())


class Fused:
    """vocab_limit: ids from it on get logit -inf. The head is padded to whole chunks of about sqrt(V) ids,
    for sampling in two levels. dtype: of products and cache."""

    def __init__(self, model, vocab_limit, dtype):
        c, device = model.config, model.head_weight.device
        self.model, self.dtype = model, dtype
        self.vocab_limit, self.chunk = vocab_limit, int(vocab_limit ** 0.5)
        self.split = c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads
        self.eps = [torch.tensor((width * c.rms_norm_eps) ** 0.5, device=device)
                    for width in (c.hidden_size, c.head_dim)]
        self.flash = model.head_weight.is_cuda and dtype != torch.float32 and flash_attn_with_kvcache
        # at query length 1 two batched products beat PyTorch's CPU attention for fp32 and small heads
        self.products = device.type == "cpu" and dtype == torch.float32 and c.head_dim <= 64
        self.weights = None
        self.refresh()

    @torch.inference_mode()
    def refresh(self):
        """Takes over the model's current weights, on CUDA in place, so that captured graphs stay valid."""
        fresh = fused_weights(self.model, self.vocab_limit, self.chunk, self.dtype)
        if self.weights and self.model.head_weight.is_cuda:
            for old, new in zip(self.weights, fresh, strict=True):
                old.copy_(new)
            return
        *layers, self.final, self.head = self.weights = [packed(w) for w in fresh]
        self.layers = [layers[i:i + 7] for i in range(0, len(layers), 7)]

    def embed(self, tokens):
        return self.model.model.embed_tokens.weight.index_select(0, tokens).to(self.dtype)

    def norm(self, x, weight):
        """RMSNorm as x / sqrt(|x|^2 + E eps) * (sqrt(E) w): four small kernels, fp32 inside."""
        size = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).hypot_(self.eps[0])
        return torch.div(x, size).mul_(weight).to(self.dtype)

    def block(self, layer, x, cis, attend, keep=slice(None)):
        """x [n,E] may be overwritten; cis [n,1,D/2] complex; attend(qkv [n,H+2G,D] with q and k rotated) ->
        [n,H*D]; the rows `keep` go on after it."""
        pre, w_qkv, head_norm, w_out, post, w_gate_up, w_down = layer
        qkv = product(self.norm(x, pre), w_qkv).view(len(x), sum(self.split), -1)
        qk = qkv[:, :-self.split[2]]
        y = qk.float()                                                      # fp32 stays the same memory
        y.div_(torch.linalg.vector_norm(y, 2, -1, True).hypot_(self.eps[1])).mul_(head_norm)
        torch.view_as_complex(y.unflatten(-1, (-1, 2))).mul_(cis)
        if y.dtype != qkv.dtype:
            qk.copy_(y)
        x = product(attend(qkv)[keep], w_out, x[keep])
        gate, up = product(self.norm(x, post), w_gate_up).chunk(2, -1)
        return product(F.silu(gate).mul_(up), w_down, x)

    def logits(self, x):
        """x [n,E] -> fp32 [n,V'], -inf from vocab_limit to the end of its chunk."""
        h = self.norm(x, self.final)
        logits = product(h.float(), self.head) if h.is_cpu else matmul_fp32(h, self.head.t())
        if logits.shape[1] > self.vocab_limit:
            logits[:, self.vocab_limit:] = -torch.inf
        return logits

    def mask(self, position, columns):
        """0 up to each row's position, -inf behind it: [n,1,T], or [n*G,1,T] for the batched products."""
        last = position.repeat_interleave(self.split[1]) if self.products else position
        seen = torch.arange(columns, device=position.device) <= last[:, None, None]
        return torch.where(seen, 0.0, -torch.inf).to(self.dtype)

    def attend(self, q, k, v, mask, position):
        """One query a row over its cache: q [n,H,D]; k, v [n,G,T,D] -> [n,H*D]. The H/G query heads of a key
        head act as that many queries."""
        n, g, _, d = k.shape
        if self.flash:
            length = (position + 1).int()
            out = self.flash(q[:, None], k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=length)
        elif self.products:
            scores = torch.baddbmm(mask, q.reshape(n * g, -1, d), k.flatten(0, 1).mT, alpha=d ** -0.5)
            out = torch.bmm(torch.softmax(scores, -1, out=scores), v.flatten(0, 1))
        else:
            out = F.scaled_dot_product_attention(q.reshape(n, g, -1, d), k, v, attn_mask=mask[:, None])
        return out.view(n, -1)
