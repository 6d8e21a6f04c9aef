"""The model as the sampler runs it: fused and packed weights, few kernels a block, memory laid out before.

`model.py` is the model; this is the same function, above all for one-token queries, where the cost is reading
weights and starting kernels. Each kernel is handed to `do(kernel, *args, **options)`: `now` runs it at once,
`Program.do` keeps it. A program runs again without the Python that found its operands, and is what a CUDA
graph captures. Weights are taken over by `refresh`; the embedding, and what needs no conversion, is the
model's own memory.

Letters in shapes: n rows, H query heads, G key/value heads, D head size, E hidden size, I inner size of the
MLP, V vocabulary, T cache columns.
"""

import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from model import onednn

try:
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None


class Program(list):
    """Kernels and their operands, in order. Calling it runs them, on the same memory every time."""

    def do(self, kernel, *args, **options):
        self.append(partial(kernel, *args, **options))

    def __call__(self):
        for kernel in self:
            kernel()


def now(kernel, *args, **options):
    kernel(*args, **options)


def laid_out(w):
    """A matrix, or a pair [2,out,in], for `product`. Small fp32 weights on a CPU: transposed; a pair stays
    one, for a batched product. Others: one matrix, on a CPU in oneDNN's own layout (up to twice as fast), 16
    bits widened where the processor has no such products (fp32 sums of the same terms, six times as fast)."""
    small = w.is_cpu and w.dtype == torch.float32 and w.numel() < 2 ** 18
    if small or not w.is_cpu or not onednn():
        return w.mT if small else w.flatten(0, -2).mT
    return torch.ops.mkldnn._reorder_linear_weight((w if onednn(w.dtype) else w.float()).flatten(0, -2), 64)


def fused_weights(model, vocab_limit, chunk, dtype):
    """Yields 7 tensors a layer, the last norm, the head. q, k, v are one product, per key head: its query
    heads, the key head, its values; gate and up are one. Rows of q and k are interleaved (i, i + D/2): the
    rotation is one complex product (scores do not see the order). Norm weights include sqrt(width): the mean
    of squares becomes a sum. In fp32 those over E are folded into the product that follows; in 16 bits that
    would round differently from the learner."""
    c, pairs = model.config, torch.arange(model.config.head_dim).view(2, -1).T.reshape(-1)
    queries, groups = c.num_attention_heads // c.num_key_value_heads, c.num_key_value_heads

    def norm(module):
        return module.weight.float() * len(module.weight) ** 0.5

    def weight(linear, after=None):
        w = linear.weight
        return (w * norm(after) if after and dtype == torch.float32 else w).to(dtype)

    for layer in model.model.layers:
        a, m, pre, post = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        q, k, v = (weight(part, pre).view(groups, -1, c.head_dim, c.hidden_size)                   # [G,.,D,E]
                   for part in (a.q_proj, a.k_proj, a.v_proj))
        yield norm(pre)                                                                             # [E]
        yield laid_out(torch.cat([q[:, :, pairs], k[:, :, pairs], v], 1).flatten(0, 2))      # [(H+2G)*D, E]
        yield torch.stack([norm(a.q_norm)[pairs]] * queries + [norm(a.k_norm)[pairs]])       # [H/G+1, D]
        yield laid_out(weight(a.o_proj))
        yield norm(post)
        yield laid_out(torch.stack([weight(m.gate_proj, post), weight(m.up_proj, post)]))   # [2,I,E]
        yield laid_out(weight(m.down_proj))
    yield norm(model.model.norm)
    # logits are fp32 products of operands in `dtype`, as in the learner; on CPU of operands widened before
    head = model.head_weight[:vocab_limit]
    head = head * norm(model.model.norm) if dtype == torch.float32 else head.to(dtype)
    yield laid_out(F.pad(head if head.is_cuda else head.float(), (0, 0, 0, -vocab_limit % chunk)))


def packed_product(x, w, out, add):
    binary, dtype = torch.ops.mkldnn._linear_pointwise.binary, w.dtype
    out.copy_(binary(x.to(dtype), out.to(dtype), w, None, "add") if add else onednn(dtype)(x.to(dtype), w))


def product(do, x, w, out, add=False):
    """x [n,in] times a matrix from `laid_out` -> `out` [n,out], with `add` onto what is there. From
    256 rows (prefill) oneDNN pays for small weights as well. fp32 from 16 bits: the head on CUDA."""
    if w.ndim == 3 and len(x) < 256:
        do(torch.bmm, x.expand(len(w), -1, -1), w, out=out)
    elif w.ndim == 3:
        for each, part in zip(w, out, strict=True):
            product(do, x, each, part)
    elif w.is_mkldnn or x.is_cpu and len(x) >= 256 and onednn(w.dtype):
        do(packed_product, x, w if w.is_mkldnn else w.t(), out, add)
    elif add:
        do(out.addmm_, x, w)
    else:
        do(torch.mm, x, w, out=out, **({} if x.dtype == out.dtype else {"out_dtype": out.dtype}))


class Fused:
    """vocab_limit: ids from it on get logit -inf. The head is padded to whole chunks of `chunk` ids,
    `width` in all, for sampling in two levels. dtype: of weights and activations."""

    def __init__(self, model, vocab_limit, dtype, chunk=512):
        c, self.device = model.config, model.head_weight.device
        self.model, self.config, self.dtype, self.half = model, c, dtype, dtype != torch.float32
        self.vocab_limit, self.chunk = vocab_limit, min(vocab_limit, chunk)
        self.width = -(-vocab_limit // self.chunk) * self.chunk
        # what eps adds to the length of a vector: to x as one more column, to a head by hypot
        self.eps, self.head_eps = (torch.tensor((size * c.rms_norm_eps) ** 0.5, device=self.device)
                                   for size in (c.hidden_size, c.head_dim))
        self.flash = self.device.type == "cuda" and self.half and flash_attn_with_kvcache
        # at query length 1 two batched products beat PyTorch's CPU attention in fp32
        self.products = self.device.type == "cpu" and not self.half
        self.refresh()

    @torch.inference_mode()
    def refresh(self):
        """Takes over the model's current weights, in place: programs and captured graphs stay valid."""
        fresh = fused_weights(self.model, self.vocab_limit, self.chunk, self.dtype)
        if hasattr(self, "weights"):
            for old, new in zip(self.weights, fresh, strict=True):
                old.copy_(new)
            return
        *layers, self.final, self.head = self.weights = list(fresh)
        self.layers = [layers[i:i + 7] for i in range(0, len(layers), 7)]
        self.paired = self.layers[0][5].ndim == 3               # are gate and up a pair [2,E,I]?

    def take(self, arena, name, *shape, dtype=None):
        """Memory of that name in `arena` (a dict), kept from call to call: a larger one only where needed."""
        new = torch.empty(math.prod(shape), dtype=dtype or self.dtype, device=self.device)
        arena[name] = max(arena.get(name, new), new, key=len)                       # the old one if both fit
        return arena[name][:len(new)].view(shape)

    def buffers(self, arena, n, columns=0):
        """Memory for n rows, to `attend` over that many columns, and each view of it that the kernels take.
        Calls with one `arena` share memory: for programs the first must have the most rows and columns. Only
        x outlives a program."""
        c, g, d = self.config, self.config.num_key_value_heads, self.config.head_dim
        take, fp32 = (partial(self.take, arena, dtype=dtype) for dtype in (None, torch.float32))
        h, masks = c.num_attention_heads // g, (n, g if self.products else 1, 1, columns)  # h: per key head
        x_eps = take("x", n, c.hidden_size + 16)[:, :c.hidden_size + 1]         # rows start on a cache line
        x_eps[:, -1] = self.eps
        s = SimpleNamespace(
            x=x_eps[:, :-1], x_eps=x_eps, y=take("y", n, c.hidden_size), length=fp32("length", n, 1),
            qkv=take("qkv", n, g, h + 2, d), head_length=fp32("head_length", n, g, h + 1, 1),
            cis=take("cis", n, 1, 1, d // 2, dtype=torch.complex64), attended=take("attended", n, g, h, d),
            gate_up=take("gate_up", *((2, n) if self.paired else (n, 2)), c.intermediate_size),
            inner=take("inner", n, c.intermediate_size), seen=take("seen", *masks, dtype=torch.bool),
            mask=take("mask", *masks), scores=take("scores", n * g, h, columns * self.products))
        s.turned = take("turned", *s.scores.mT.shape)
        s.q, s.k, s.v, s.narrow = s.qkv[:, :, :h], s.qkv[:, :, h], s.qkv[:, :, h + 1], s.qkv[:, :, :h + 1]
        # norms and rotation are fp32, beside 16 bits in memory of their own
        s.y32, s.qk = (fp32("y32", *s.y.shape), fp32("qk", *s.narrow.shape)) if self.half else (s.y, s.narrow)
        s.pairs = torch.view_as_complex(s.qk.unflatten(-1, (-1, 2)))
        s.gate, s.up = s.gate_up.unbind(0 if self.paired else 1)
        return s

    # ---- the parts of a forward pass, as kernels for `do`; s: from `buffers`
    def embed(self, do, s, tokens):
        w, x = self.model.model.embed_tokens.weight, s.x
        do(lambda: torch.index_select(w, 0, tokens, out=x) if w.dtype == x.dtype else x.copy_(w[tokens]))

    def norm(self, do, s, weight):
        """x -> y. RMSNorm as x / sqrt(|x|^2 + E eps), the length of x with its eps column; times sqrt(E) w
        unless in fp32, where w is part of the next product: few small kernels, fp32 inside."""
        do(torch.linalg.vector_norm, s.x_eps, 2, -1, True, dtype=torch.float32, out=s.length)
        do(torch.div, s.x, s.length, out=s.y32)
        if self.half:
            do(s.y32.mul_, weight)
            do(s.y.copy_, s.y32)

    def project(self, do, s, layer):
        """First half of a block, up to attention: x -> qkv, normed and rotated by cis."""
        pre, w_qkv, head_norm, *_ = layer
        self.norm(do, s, pre)
        product(do, s.y, w_qkv, s.qkv.flatten(1))
        if self.half:
            do(s.qk.copy_, s.narrow)
        do(torch.linalg.vector_norm, s.qk, 2, -1, True, out=s.head_length)
        do(s.head_length.hypot_, self.head_eps)
        do(s.qk.div_, s.head_length)
        do(s.qk.mul_, head_norm)
        do(s.pairs.mul_, s.cis)
        if self.half:
            do(s.narrow.copy_, s.qk)

    def finish(self, do, s, layer):
        """Second half: x and attended -> x."""
        *_, w_out, post, w_gate_up, w_down = layer
        product(do, s.attended.flatten(1), w_out, s.x, add=True)
        self.norm(do, s, post)
        product(do, s.y, w_gate_up, s.gate_up if self.paired else s.gate_up.flatten(1))
        do(F.silu, s.gate, inplace=True)
        do(torch.mul, s.gate, s.up, out=s.inner)
        product(do, s.inner, w_down, s.x, add=True)

    def logits(self, do, s, out):
        """x -> out, fp32 [n,width], -inf from vocab_limit on."""
        self.norm(do, s, self.final)
        if self.half and out.is_cpu:
            do(s.y32.copy_, s.y)
        product(do, s.y32 if out.is_cpu else s.y, self.head, out)
        if self.width > self.vocab_limit:
            do(out[:, self.vocab_limit:].fill_, -torch.inf)

    # ---- attention of one query a row over its cache
    def see(self, do, s, position, span):
        """mask: 0 for the columns up to each row's position, -inf after it; span: 0 ... T - 1."""
        do(torch.le, span.expand(s.mask.shape[1:]), position.view(-1, 1, 1, 1), out=s.seen)
        do(torch.where, s.seen, s.mask.new_zeros(()), s.mask.new_full((), -torch.inf), out=s.mask)

    def attend(self, do, s, k, v, position):
        """q and a cache k, v [n,G,T,D] -> attended. Without flash-attn the H/G query heads of a key head act
        as that many queries."""
        if self.products:
            q, k, v = (x.view(-1, *x.shape[2:]) for x in (s.q, k, v))       # never a copy
            mask, turn = s.mask.flatten(0, 1), self.config.head_dim >= 128  # MKL: then faster this way
            a, b, add, out = (k, q, mask.mT, s.turned) if turn else (q, k, mask, s.scores)
            do(torch.baddbmm, add, a, b.mT, alpha=self.config.head_dim ** -0.5, out=out)
            if turn:
                do(s.scores.copy_, out.mT)
            do(torch.softmax, s.scores, -1, out=s.scores)
            do(torch.bmm, s.scores, v, out=s.attended.flatten(0, 1))
        elif self.flash:
            k, v, out = k.transpose(1, 2), v.transpose(1, 2), s.attended.flatten(1, 2)[:, None]
            do(lambda: out.copy_(self.flash(        # slots without a row may stand behind the columns
                s.q.flatten(1, 2)[:, None], k, v, cache_seqlens=(position + 1).clamp(max=k.shape[1]).int())))
        else:
            do(lambda: s.attended.copy_(F.scaled_dot_product_attention(s.q, k, v, attn_mask=s.mask)))
