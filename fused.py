"""The model as decoding wants it: fused, packed weights and each block in few kernels. No cache, no sampling.

`model.py` is the model; this is the same function for one-token queries, where the cost is reading weights
and starting kernels. Weights change only in `refresh`, after each optimizer step; the embedding is the
model's own. Letters in shapes: n rows, H query heads, G key/value heads, D head size, E hidden size,
V vocabulary, T cache columns. flash-attn's kernel over a cache has not run on a GPU yet.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from model import linear_fp32, onednn

try:
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None


def fused_weights(model, vocab_limit, chunk, dtype):
    """Yields 7 tensors a layer, the last norm, the head. q, k, v are one product, gate and up one. The rows
    of q and k are interleaved (i, i + D/2), so that the rotation is one complex product (scores do not see
    the order). Norm weights take in sqrt(width): the mean of squares becomes a sum. In fp32 they are part of
    the product that follows; in 16 bits that would round differently from the learner."""
    c, pairs = model.config, torch.arange(model.config.head_dim).view(2, -1).T.reshape(-1)

    def norm(module):
        return module.weight.float() * len(module.weight) ** 0.5

    def rows(*parts, after=None):
        w = torch.cat([part.weight for part in parts])
        return (w * norm(after) if after and dtype == torch.float32 else w).to(dtype)

    for layer in model.model.layers:
        a, m, pre, post = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        qk = rows(a.q_proj, a.k_proj, after=pre).unflatten(0, (-1, c.head_dim))[:, pairs].flatten(0, 1)
        yield norm(pre)                                                                             # [E]
        yield torch.cat([qk, rows(a.v_proj, after=pre)])                                     # [(H+2G)*D, E]
        yield torch.cat([norm(x)[pairs].expand(1, heads, -1) for x, heads in                     # [1,H+G,D]
                         ((a.q_norm, c.num_attention_heads), (a.k_norm, c.num_key_value_heads))], 1)
        yield rows(a.o_proj)
        yield norm(post)
        yield rows(m.gate_proj, m.up_proj, after=post)
        yield rows(m.down_proj)
    yield norm(model.model.norm)
    # logits are fp32 products of operands in `dtype`, as in the learner; on CPU of operands widened before
    head = model.head_weight[:vocab_limit]
    head = head * norm(model.model.norm) if dtype == torch.float32 else head.to(dtype)
    yield F.pad(head if head.is_cuda else head.float(), (0, 0, 0, -vocab_limit % chunk))


def laid_out(w):
    """Matrices for `product`: in oneDNN's own layout where that pays (up to twice as fast on CPU, but not for
    small fp32 weights), else transposed."""
    if w.is_cpu and w.ndim == 2 and onednn(w.dtype) and (w.dtype != torch.float32 or w.numel() >= 2 ** 16):
        return torch.ops.mkldnn._reorder_linear_weight(w, 64)
    return w.t() if w.ndim == 2 else w


def product(x, w, residual=None, out=None):
    """x [n,in] times a matrix from `laid_out` -> [n,out], into `out` when given, plus `residual` when given,
    which may be overwritten. From some hundred rows (prefill) oneDNN pays for small weights as well."""
    if not w.is_mkldnn:
        if not (x.is_cpu and len(x) >= 256 and onednn(w.dtype)):
            return torch.mm(x, w, out=out) if residual is None else residual.addmm_(x, w)
        w = w.t()
    op = torch.ops.mkldnn._linear_pointwise
    y = op(x, w, None, "none", [], "") if residual is None else op.binary(x, residual, w, None, "add")
    return y if out is None else out.copy_(y)


class Fused:
    """vocab_limit: ids from it on get logit -inf. The head is padded to whole chunks of about sqrt(V) ids,
    for sampling in two levels. dtype: of products and cache."""

    def __init__(self, model, vocab_limit, dtype):
        c, device = model.config, model.head_weight.device
        self.model, self.dtype = model, dtype
        self.vocab_limit, self.chunk = vocab_limit, 1 << vocab_limit.bit_length() // 2
        self.heads, self.groups, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        # sqrt(width * eps): what hypot adds to the length of a vector
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
        fresh = map(laid_out, fused_weights(self.model, self.vocab_limit, self.chunk, self.dtype))
        if self.weights and self.model.head_weight.is_cuda:
            for old, new in zip(self.weights, fresh, strict=True):
                old.copy_(new)
            return
        *layers, self.final, self.head = self.weights = list(fresh)
        self.layers = [layers[i:i + 7] for i in range(0, len(layers), 7)]

    def embed(self, tokens):
        return self.model.model.embed_tokens.weight.index_select(0, tokens).to(self.dtype)

    def norm(self, x, weight):
        """RMSNorm as x / sqrt(|x|^2 + E eps), times sqrt(E) w unless in fp32, where w is part of the next
        product: few small kernels, fp32 inside."""
        y = torch.div(x, torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).hypot_(self.eps[0]))
        return y if self.dtype == torch.float32 else y.mul_(weight).to(self.dtype)

    def scratch(self, n):
        """Memory for q, k, v of n rows and every view of it that `block` needs: views cost as much as small
        kernels. -> qkv [n,(H+2G)*D], q and k in fp32 [n,H+G,D], q [n,H,D], k [n,G,D], k and v [n,2G,D]"""
        h, g, d = self.heads, self.groups, self.head_dim
        device, wide = self.model.head_weight.device, self.dtype != torch.float32
        qkv, q = (torch.empty(n, heads, d, dtype=self.dtype, device=device) for heads in (h + 2 * g, h))
        qk = torch.empty(n, h + g, d, device=device) if wide else qkv[:, :h + g]
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2)))
        q_pairs = pairs[:, :h] if wide else torch.view_as_complex(q.unflatten(-1, (-1, 2)))
        return SimpleNamespace(
            qkv=qkv.flatten(1), narrow=qkv[:, :h + g] if wide else None, qk=qk, q=q, kv=qkv[:, h:],
            k=qkv[:, h:h + g], v=qkv[:, h + g:], pairs=(pairs[:, :h], pairs[:, h:], q_pairs))

    def block(self, layer, x, cis, s, attend, keep=None):
        """x [n,E] may be overwritten; cis [n,1,D/2] complex; s from `scratch`; attend() -> [n,H*D] from the
        q, k and v that it finds there, rotated; the rows `keep` go on after it."""
        pre, w_qkv, head_norm, w_out, post, w_gate_up, w_down = layer
        product(self.norm(x, pre), w_qkv, out=s.qkv)
        if s.narrow is not None:
            s.qk.copy_(s.narrow)
        s.qk.div_(torch.linalg.vector_norm(s.qk, 2, -1, True).hypot_(self.eps[1])).mul_(head_norm)
        q, k, rotated = s.pairs
        torch.mul(q, cis, out=rotated)
        k.mul_(cis)
        if s.narrow is not None:
            s.q.copy_(s.qk[:, :self.heads])
            s.k.copy_(s.qk[:, self.heads:])
        y = attend()
        if keep is not None:
            x, y = x[keep], y[keep]
        x = product(y, w_out, x)
        gate, up = product(self.norm(x, post), w_gate_up).chunk(2, -1)
        return product(F.silu(gate).mul_(up), w_down, x)

    def logits(self, x):
        """x [n,E] -> fp32 [n,V'], -inf from vocab_limit to the end of its chunk."""
        h = self.norm(x, self.final)
        logits = product(h.float(), self.head) if h.is_cpu else linear_fp32(h, self.head.T)
        if logits.shape[1] > self.vocab_limit:
            logits[:, self.vocab_limit:] = -torch.inf
        return logits

    def mask(self, position, columns):
        """0 up to each row's position, -inf behind it: [n,1,T], or [n*G,1,T] for the batched products."""
        last = position[:, None].expand(-1, self.groups) if self.products else position
        seen = torch.arange(columns, device=position.device) <= last.reshape(-1, 1, 1)
        return torch.where(seen, 0.0, -torch.inf).to(self.dtype)

    def cached(self, k, v):
        """Keys and values [n,G,T,D] in the shapes that `attend` wants."""
        return (k.flatten(0, 1).mT, v.flatten(0, 1)) if self.products else (k, v)

    def attend(self, q, k, v, mask, position):
        """One query a row over its cache: q [n,H,D]; k, v from `cached` -> [n,H*D]. The H/G query heads of a
        key head act as that many queries."""
        if self.products:
            scores = torch.baddbmm(mask, q.view(len(k), -1, self.head_dim), k, alpha=self.head_dim ** -0.5)
            out = torch.bmm(torch.softmax(scores, -1, out=scores), v)
        elif self.flash:
            length = (position + 1).int()
            out = self.flash(q[:, None], k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=length)
        else:
            q = q.unflatten(1, (self.groups, -1))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return out.view(len(q), -1)
