"""Sampling: KV cache, one prefill per prompt, batched decode with refill; and a command line to talk to a model.

    python sample.py --model Qwen/Qwen3-0.6B "What is 17 * 23?"           # prints as it generates
    python sample.py --model tiny/model --temperature 0 < questions.txt   # one question a line, one batch

    sampler = Sampler(model, eos_ids, vocab_limit, slots=32)
    responses = sampler.generate(prompts, rows, samples=8, seed=42, step=0, sampling=Sampling())
    sampler.refresh()                                                     # after every optimizer step

Contract. The noise of a token is one float64 uniform, a function of (seed, step, prompt row, sample, position)
alone, turned into an id by the inverse CDF: batch mates, refill, world size and resume change nothing but
rounding. Log-probs are those of the learner (`model.token_logp`): softmax over ids < vocab_limit of the fp32
logits / temperature, also for rows that truncate by top-k or top-p; greedy rows report temperature 1. EOS is kept
as the last token. Ids are never re-encoded text.

Letters in shape comments: N packed tokens, n decoded rows, H query heads, G key/value heads, D head size,
E hidden size, V vocabulary, T cache columns in use. The CUDA path (graphs, flash-attn) has not run on a GPU yet.
"""

import dataclasses
import sys
import time
from collections import deque
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from model import Qwen3, attention, load_model, local_folder, pack, rope_tables


# ------------------------------------------------------------------------------------------ requests, results
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to pick tokens. top-k (0 = off) cuts first and keeps exactly k ids, ties by lowest id; top-p (1 = off)
    then keeps the smallest set of the likeliest ids that holds at least that share, never fewer than one."""
    temperature: float = 1.0        # 0 = greedy: the largest logit, lowest id among equals; consumes no noise
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} is not a number >= 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]; for greedy decoding set temperature 0")
        if self.top_k < 0 or self.max_new_tokens < 0:
            raise ValueError(f"top_k {self.top_k} and max_new_tokens {self.max_new_tokens} must not be negative")


class Response(NamedTuple):
    row: int
    sample: int
    tokens: list
    logps: list
    finish: str         # "stop": EOS is the last token | "length": max_new_tokens | "context": no position left


def uniforms(seed, step, row, sample, count):
    """The first `count` draws in [0, 1) of one response. Philox is a counter-based generator: (seed, step) is its
    key, (row, sample) the upper half of its counter, so that no two responses can share a stream."""
    try:
        bits = np.random.Philox(counter=[0, 0, row, sample], key=[seed, step])
    except (ValueError, OverflowError):
        raise ValueError(f"seed {seed}, step {step}, row {row}, sample {sample}: must be in [0, 2^64)") from None
    return np.random.Generator(bits).random(count)


# --------------------------------------------------------------------------------------------- picking tokens
BELOW_ONE = 1 - 2.0 ** -52


def inverse_cdf(p, u, block):
    """First id whose cumulative probability exceeds u * total. p [n,V] fp32 with V a multiple of `block`, u [n,1]
    float64 -> [n,1]. Two levels, so that V is read once: float64 sums of blocks, then inside the chosen block.
    An id with p = 0 does not move the cumulative sum and cannot be first; u * total stays below the total."""
    blocks = p.view(p.shape[0], -1, block)
    cum = blocks.sum(-1, dtype=torch.float64).cumsum_(-1)                                       # [n, V / block]
    target = torch.minimum(cum[:, -1:] * u, cum[:, -1:] * BELOW_ONE)
    b = torch.searchsorted(cum, target, right=True).clamp_(max=cum.shape[1] - 1)                # clamp: NaN only
    inside = blocks.gather(1, b[:, :, None].expand(-1, -1, block))[:, 0].cumsum(-1, dtype=torch.float64)
    target -= F.pad(cum, (1, 0)).gather(1, b)
    torch.minimum(target, inside[:, -1:] * BELOW_ONE, out=target)
    return torch.searchsorted(inside, target, right=True).clamp_(max=block - 1).add_(b, alpha=block)


def truncate(p, top_k, top_p):
    """p [n,V] with the ids outside top-k (then top-p) set to 0; rows with k = V and top_p = 1 stay as they are."""
    ordered, ids = p.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(p.shape[1], device=p.device) < top_k                                    # [n,V]
    cum = ordered.double().mul_(keep).cumsum_(-1)
    keep &= (cum - ordered < top_p * cum[:, -1:]) | (top_p >= 1)
    keep[:, 0] = True
    return p * torch.zeros_like(keep).scatter_(1, ids, keep)


# ---------------------------------------------------------------------------------------------------- weights
def _packed_ops():
    """oneDNN's (pack, linear, linear + residual), or None where this PyTorch has no such ops."""
    try:
        linear = torch.ops.mkldnn._linear_pointwise
        return torch.ops.mkldnn._reorder_linear_weight.default, linear.default, linear.binary
    except (AttributeError, RuntimeError):
        return None


class Linear:
    """x @ W^T with W = `build()` made anew by refresh(): packed by oneDNN where that pays, else in place, so that
    captured graphs stay valid. Packing is worth 1.2 to 2x, except for small fp32 weights."""

    def __init__(self, build, dtype):
        self.build, self.dtype, self.weight, self.ops = build, dtype, None, None

    def refresh(self):
        weight = self.build().to(self.dtype)
        if self.weight is None:
            small = weight.dtype == torch.float32 and weight.numel() < 2 ** 16
            if weight.device.type == "cpu" and not small and torch.backends.mkldnn.is_available():
                self.ops = _packed_ops()
        if self.ops:
            try:
                self.weight = self.ops[0](weight, 64)
                return
            except RuntimeError:        # this CPU has no kernel for the dtype
                self.ops, self.weight = None, None
        if self.weight is None:
            self.weight = torch.empty_like(weight)
        self.weight.copy_(weight)

    def __call__(self, x):
        return self.ops[1](x, self.weight, None, "none", [], "") if self.ops else F.linear(x, self.weight)

    def add(self, x, residual):
        """residual + x @ W^T; `residual` is consumed."""
        if self.ops:
            return self.ops[2](x, residual, self.weight, None, "add")
        return residual.addmm_(x, self.weight.t())


class Weights:
    """The model's weights in the shape that decoding wants: q, k, v in one product, gate and up in one, the
    weight of each RMSNorm and its sqrt(E) folded into the product that follows, and the rows of q and k
    interleaved (i, i + D/2) so that the rotation is one complex product (scores do not see the order)."""

    def __init__(self, model, vocab_limit, dtype):
        c, self.model, self.dtype = model.config, model, dtype
        d, device = c.head_dim, model.head_weight.device
        self.vocab = min(vocab_limit, c.vocab_size)
        self.block = max(16, int(self.vocab ** 0.5))
        width, heads = c.hidden_size ** 0.5, c.num_attention_heads + c.num_key_value_heads
        pairs = torch.arange(d, device=device).view(2, -1).T.reshape(-1)
        order = torch.arange((heads + c.num_key_value_heads) * d, device=device).view(-1, d)
        order[:heads] = order[:heads][:, pairs]
        self.order, self.pairs, self.split = order.reshape(-1), pairs, (c.num_attention_heads, c.num_key_value_heads)
        self.layers = []
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            pre, post = layer.input_layernorm, layer.post_attention_layernorm
            self.layers.append((
                Linear(lambda a=a, pre=pre: self._fused(pre, width, a.q_proj, a.k_proj, a.v_proj)[self.order], dtype),
                torch.empty(heads, d, device=device),
                Linear(lambda a=a: a.o_proj.weight, dtype),
                Linear(lambda m=m, post=post: self._fused(post, width, m.gate_proj, m.up_proj), dtype),
                Linear(lambda m=m: m.down_proj.weight, dtype)))
        self.head = Linear(self._head, dtype)
        self.embed_eps = torch.tensor((c.hidden_size * c.rms_norm_eps) ** 0.5, device=device)
        self.head_eps = torch.tensor((d * c.rms_norm_eps) ** 0.5, device=device)

    def _fused(self, norm, width, *parts):
        return torch.cat([part.weight for part in parts]) * (norm.weight * width)

    def _head(self):
        """[V',E]: the ids that may be sampled, and zero rows up to a whole number of blocks."""
        norm = self.model.model.norm.weight * self.model.config.hidden_size ** 0.5
        return F.pad(self.model.head_weight[:self.vocab] * norm, (0, 0, 0, -self.vocab % self.block))

    @torch.inference_mode()
    def refresh(self):
        for layer, (qkv, head_norm, out, gate_up, down) in zip(self.model.model.layers, self.layers, strict=True):
            for linear in (qkv, out, gate_up, down):
                linear.refresh()
            h, a = self.split[0], layer.self_attn
            head_norm[:h], head_norm[h:] = a.q_norm.weight[self.pairs], a.k_norm.weight[self.pairs]
            head_norm *= self.model.config.head_dim ** 0.5
        self.head.refresh()

    def norm(self, x):
        """x / sqrt(|x|^2 + E eps) [n,E]: RMSNorm without what the weights already hold, in three small kernels."""
        size = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).hypot_(self.embed_eps)
        return torch.div(x, size).to(self.dtype)

    def rotate_heads(self, qkv, head_norm, cis):
        """RMSNorm of each q and k head, then the rotation, in place. qkv [n,H+2G,D], cis [n,1,D/2] complex."""
        qk = qkv[:, :-self.split[1]]
        y = qk.float()                                                    # fp32 stays the same memory
        y.div_(torch.linalg.vector_norm(y, 2, -1, True).hypot_(self.head_eps)).mul_(head_norm)
        torch.view_as_complex(y.unflatten(-1, (-1, 2))).mul_(cis)
        if y.dtype != qkv.dtype:
            qk.copy_(y)

    def block_forward(self, layer, x, cis, attend):
        """One transformer block. attend(qkv [n,H+2G,D]) -> [n,H*D]. x [n,E] is consumed."""
        qkv, head_norm, out, gate_up, down = layer
        y = qkv(self.norm(x)).view(x.shape[0], sum(self.split) + self.split[1], -1)
        self.rotate_heads(y, head_norm, cis)
        x = out.add(attend(y), x)
        gate, up = gate_up(self.norm(x)).chunk(2, -1)
        return down.add(F.silu(gate).mul_(up), x)


# ---------------------------------------------------------------------------------------------------- sampler
def _bucket(n, sizes=(1, 2, 4, 8)):
    """n rounded up to 1, 2, 4 or a multiple of 8: few shapes, so few kernels to prepare and graphs to capture."""
    return next((s for s in sizes if n <= s), -(-n // 8) * 8)


def cuda_capture(step):
    """Records `step` as a CUDA graph and returns its replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Sampler:
    """Static slots: row i of every buffer below is slot i. Finished rows stop counting at the next check, waiting
    rows take their slots, and when nobody waits the last rows move into the holes so that views [:n] stay dense.

    eos_ids: every id that ends a response. vocab_limit: ids from it on are never sampled. dtype: of weights,
    products and cache; default bfloat16 on CUDA, else that of the model. max_len: the longest prompt + response.
    """

    def __init__(self, model: Qwen3, eos_ids, vocab_limit, slots=32, dtype=None, max_len=None):
        self.model, self.config, self.device = model, model.config, model.head_weight.device
        self.cuda = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if self.cuda else model.head_weight.dtype)
        self.eos = np.array(sorted(eos_ids), dtype=np.int64)
        if vocab_limit < 1 or slots < 1:
            raise ValueError(f"vocab_limit {vocab_limit} and slots {slots} must be positive")
        self.max_slots, self.max_len = slots, max_len or self.config.max_position_embeddings
        self.weights = Weights(model, vocab_limit, self.dtype)
        self.check_every, self.columns = (16, 256) if self.cuda else (1, 16)      # steps between checks; T's bucket
        self.capture = cuda_capture if self.cuda else None
        self.cache = self.out_tokens = None
        self.refresh()

    def refresh(self):
        """Takes over the model's current weights. Call after every optimizer step."""
        self.weights.refresh()

    # ---- memory
    def _allocate(self, slots, length, requests, columns):
        """Buffers for `slots` rows of `length` cache columns, kept when they are large enough."""
        c, dev = self.config, self.device
        length = -(-length // 64) * 64
        if self.cache is None or slots > self.cache.shape[2] or length > self.cache.shape[4]:
            if self.cache is not None:
                slots, length = max(slots, self.cache.shape[2]), max(length, self.cache.shape[4])
            g, self.cache = c.num_key_value_heads, None
            self.cache = torch.zeros(c.num_hidden_layers, 2, slots, g, length, c.head_dim, dtype=self.dtype, device=dev)
            row = torch.arange(2 * slots * g, device=dev).view(2, slots, g).transpose(0, 1).reshape(slots, 2 * g)
            self.cell = row * length                       # where a slot's K and V heads begin, in columns of D
            self.cis = torch.complex(*rope_tables(c, length, dev))[:, None]                   # [length,1,D/2]
            zeros = dict(dtype=torch.int64, device=dev)
            self.state = torch.zeros(2, slots, **zeros)    # [position of the next token, its index in out_*]
            self.live = torch.zeros(slots, **zeros)        # 1 while the row counts
            self.token = torch.zeros(slots, **zeros)
            self.hidden = torch.zeros(slots, c.hidden_size, dtype=self.dtype, device=dev)
            self.options = torch.ones(3, slots, 1, device=dev)          # temperature (0 = greedy), top_k, top_p
            self.column = torch.arange(length, device=dev)
            self.plans, self.graphs = {}, {}
        if self.out_tokens is None or requests * columns >= self.out_tokens.numel():
            self.out_tokens, self.out_logps, self.noise = (
                torch.zeros(requests * columns + 1, dtype=t, device=dev) for t in (torch.int64, torch.float32, torch.float64))
            self.graphs = {}

    # ---- the two halves of a step, on rows [:n] of static buffers
    def _pick(self, n, greedy, truncated):
        """hidden [n,E] -> the next token and its log-prob, written to `token` and to the row's place in out_*."""
        w, cursor = self.weights, self.state[1, :n]
        logits = w.head(w.norm(self.hidden[:n])).float()                                        # [n,V']
        logits[:, w.vocab:] = -torch.inf
        temperature, top_k, top_p = self.options[:, :n]
        if greedy:
            best = logits.argmax(-1)
            is_greedy = temperature == 0
            temperature = torch.where(is_greedy, 1, temperature)
        p = logits.div_(temperature).softmax(-1)
        kept = truncate(p, top_k, top_p) if truncated else p
        token = inverse_cdf(kept, self.noise[cursor][:, None], w.block)                         # [n,1]
        if greedy:
            token = torch.where(is_greedy, best[:, None], token)
        self.out_logps.index_copy_(0, cursor, p.gather(1, token).log_()[:, 0])
        self.out_tokens.index_copy_(0, cursor, token[:, 0])
        self.token[:n] = token[:, 0]

    def _forward(self, n, used):
        """token [n] -> hidden [n,E], keys and values appended at each row's own position, T = `used` columns."""
        if (n, used) not in self.plans:         # the views are made once: they cost as much as a small kernel
            k, v = self.cache[:, 0, :n, :, :used], self.cache[:, 1, :n, :, :used]               # [L,n,G,T,D]
            self.plans[n, used] = [(self.cache[i].view(-1, self.config.head_dim), k[i], v[i]) for i in range(len(k))]
        w, position = self.weights, self.state[0, :n]
        cell = self.cell[:n] + position[:, None]                                                # [n,2G]
        cis = self.cis[position]
        mask = torch.where(self.column[:used] <= position[:, None], 0.0, -torch.inf)
        x = self.model.model.embed_tokens.weight[self.token[:n]].to(self.dtype)
        for layer, (flat, k, v) in zip(w.layers, self.plans[n, used], strict=True):
            def attend(qkv, flat=flat, k=k, v=v):
                flat[cell] = qkv[:, w.split[0]:]
                return self._attend(qkv[:, :w.split[0]], k, v, mask)
            x = w.block_forward(layer, x, cis, attend)
        self.hidden[:n] = x
        self.state[:, :n] += self.live[:n]

    def _attend(self, q, k, v, mask):
        """One query a row over its cache. q [n,H,D], k and v [n,G,T,D], mask [n,T] of 0 and -inf -> [n,H*D]."""
        n, g, used, d = k.shape
        q = q.reshape(n, g, -1, d)              # the H/G query heads of a key head act as that many queries
        mask = mask[:, None, None].to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).view(n, -1)

    def _run(self, key, step):
        """Runs a step; on CUDA the second run of a key is captured as a graph, later ones replay it."""
        if self.capture is None:
            return step()
        if key not in self.graphs:
            self.graphs[key] = None             # the first run is the warm-up that a capture needs
            return step()
        if self.graphs[key] is None:
            self.graphs[key] = self.capture(step)
        self.graphs[key]()

    # ---- prefill and admission
    def _prefill(self, prompts):
        """Runs distinct prompts packed -> [(keys and values [L,2,G,P,D], last hidden state [E])] for each."""
        c, w, batch = self.config, self.weights, pack(prompts, [], []).to(self.device)
        heads, groups = w.split
        stored = torch.empty(c.num_hidden_layers, 2, groups, len(batch.tokens), c.head_dim,
                             dtype=self.dtype, device=self.device)
        cis = self.cis[batch.positions]
        x = self.model.model.embed_tokens.weight[batch.tokens].to(self.dtype)
        for layer, kv in zip(w.layers, stored, strict=True):
            def attend(qkv, kv=kv):
                q, k, v = qkv.split([heads, groups, groups], 1)
                kv[0], kv[1] = k.transpose(0, 1), v.transpose(0, 1)
                return attention(q, k, v, batch).flatten(1)
            x = w.block_forward(layer, x, cis, attend)
        ends = np.cumsum(batch.q_lens)
        return [(stored[:, :, :, end - size:end], x[end - 1]) for end, size in zip(ends, batch.q_lens, strict=True)]

    def _next_prompt(self, p, prompts):
        """The prefilled prompt p; prompts behind it are run with it, up to 2,048 tokens, for the rows to come."""
        if p not in self.prefilled:
            began, last, tokens = time.perf_counter(), p, 0
            while last < len(prompts) and (last == p or tokens + len(prompts[last]) <= 2048):
                tokens += len(prompts[last])
                last += 1
            self.prefilled = dict(zip(range(p, last), self._prefill(prompts[p:last]), strict=True))
            if self.cuda:
                torch.cuda.synchronize()
            self.stats["prefill_tokens"] += tokens
            self.stats["prefill_s"] += time.perf_counter() - began
        return self.prefilled[p]

    def _admit(self, run):
        """Waiting requests take free slots: cache and state of each, noise drawn once for the whole response."""
        slots, jobs, hidden = [], [], []
        for slot in np.flatnonzero(run.job < 0).tolist():
            if not run.waiting:
                break
            job = run.waiting.popleft()
            (kv, last), size = self._next_prompt(run.prompt[job], run.prompts), run.length[job]
            self.cache[:, :, slot, :, :size] = kv
            slots.append(slot)
            jobs.append(job)
            hidden.append(last)
        if not slots:
            return
        run.job[slots], run.count[slots] = jobs, 0
        index = torch.tensor(slots, device=self.device)
        self.hidden[index] = torch.stack(hidden)
        first = np.array(jobs) * run.columns
        self.state[:, index] = torch.tensor(np.stack([run.length[jobs], first]), device=self.device)
        self.live[index] = 1
        self.options[:, index] = torch.tensor(run.options[:, jobs], device=self.device)
        noise = np.zeros((len(jobs), run.columns))
        for i, job in enumerate(jobs):
            if run.options[0, job] > 0:
                noise[i, :run.budget[job]] = uniforms(*run.keys[job], run.budget[job])
        cells = torch.from_numpy(first[:, None] + np.arange(run.columns)).to(self.device)
        self.noise[cells] = torch.from_numpy(noise).to(self.device)

    # ---- the loop
    @torch.inference_mode()
    def generate(self, prompts, rows, samples, seed, step, sampling, on_tokens=None):
        """`samples` responses to each prompt (ids), ordered by prompt, then sample. `rows` names the prompts in the
        noise key. `sampling`: one for all, or one per prompt. on_tokens(prompt, sample, new tokens) is called as
        they come. Raises ValueError for an empty or too long prompt, and for NaN or infinite logits."""
        run = _Run(self, prompts, rows, samples, seed, step, sampling, on_tokens)
        self.stats = dict(prefill_tokens=0, prefill_s=0.0, decode_tokens=0, decode_s=0.0, decode_steps=0)
        self.prefilled = {}
        if run.waiting:
            self._allocate(len(run.job), max(run.length[j] + run.budget[j] for j in run.waiting) + self.check_every,
                           len(run.responses), run.columns)
            self.live.zero_()
            self.state[1] = len(self.out_tokens) - 1        # slots without a row write where nobody reads
        began = time.perf_counter()
        while run.waiting or (run.job >= 0).any():
            self._admit(run)
            n = _bucket(1 + np.flatnonzero(run.job >= 0)[-1])
            for i in range(self.check_every):
                self._run(("pick", n, run.greedy, run.truncated), lambda n=n: self._pick(n, run.greedy, run.truncated))
                self.stats["decode_steps"] += 1
                used = run.used() + i + 1           # the columns that the longest row has after this step
                if i == self.check_every - 1:
                    n = self._compact(run, n) if run.check(self, n) else n
                if n:
                    used = min(-(-used // self.columns) * self.columns, self.cache.shape[4])
                    self._run(("forward", n, used), lambda n=n, used=used: self._forward(n, used))
        self.prefilled = {}
        self.stats["decode_s"] = time.perf_counter() - began - self.stats["prefill_s"]
        self.stats["decode_tokens"] = sum(len(r.tokens) for r in run.responses)
        return run.responses

    def _compact(self, run, n):
        """Dead rows stop counting; with nobody waiting the last rows move into the holes. -> rows to decode."""
        alive = np.flatnonzero(run.job >= 0)
        self.live[:n] = torch.from_numpy((run.job[:n] >= 0).astype(np.int64)).to(self.device)
        size = _bucket(len(alive)) if len(alive) else 0
        if run.waiting or size >= n:
            return n if len(alive) else 0
        movers = alive[alive >= size]
        holes = np.flatnonzero(run.job[:size] < 0)[:len(movers)]
        if len(movers):
            src, dst = (torch.from_numpy(i).to(self.device) for i in (movers, holes))
            self.cache[:, :, dst] = self.cache[:, :, src]
            for buffer in (self.state, self.options):
                buffer[:, dst] = buffer[:, src]
            for buffer in (self.live, self.token):
                buffer[dst] = buffer[src]
            for array in (run.job, run.count):
                array[holes] = array[movers]
            run.job[movers] = -1
            self.live[src] = 0
        return size


class _Run:
    """The host's side of one `generate`: who waits, who sits in which slot, what is finished."""

    def __init__(self, sampler, prompts, rows, samples, seed, step, sampling, on_tokens):
        per_prompt = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if not len(prompts) == len(rows) == len(per_prompt):
            raise ValueError(f"{len(prompts)} prompts, {len(rows)} rows, {len(per_prompt)} sampling options")
        for row, ids in zip(rows, prompts, strict=True):
            if not 0 < len(ids) <= sampler.max_len:
                raise ValueError(f"row {row}: a prompt of {len(ids)} tokens; it takes 1 to {sampler.max_len}")
        self.prompts, self.on_tokens, self.step, self.eos = prompts, on_tokens, step, sampler.eos
        self.prompt = np.repeat(np.arange(len(prompts)), samples)
        self.length = np.array([len(ids) for ids in prompts], dtype=np.int64)[self.prompt]
        caps = np.array([s.max_new_tokens for s in per_prompt], dtype=np.int64)[self.prompt]
        self.budget = np.minimum(caps, sampler.max_len - self.length)
        self.full = np.where(self.budget < caps, "context", "length")
        self.keys = [(seed, step, row, sample) for row in rows for sample in range(samples)]
        self.options = np.array([(s.temperature, s.top_k or sampler.weights.vocab, s.top_p) for s in per_prompt],
                                dtype=np.float32)[self.prompt].T[:, :, None]
        self.greedy = any(s.temperature == 0 for s in per_prompt)
        self.truncated = any(s.top_p < 1 or s.top_k > 0 for s in per_prompt)
        self.columns = int(self.budget.max(initial=0)) + sampler.check_every
        self.responses = [Response(row, sample, [], [], str(full))
                          for (_, _, row, sample), full in zip(self.keys, self.full, strict=True)]
        self.waiting = deque(np.flatnonzero(self.budget > 0).tolist())
        slots = _bucket(min(sampler.max_slots, len(self.waiting))) if self.waiting else 0
        self.job = np.full(slots, -1)               # the request in each slot
        self.count = np.zeros(slots, dtype=np.int64)

    def used(self):
        """Cache columns that the longest row holds now."""
        alive = self.job >= 0
        return int((self.length[self.job] + self.count)[alive].max())

    def check(self, sampler, n):
        """Looks at the tokens since the last check; finished rows give up their slots. -> whether any did"""
        k, alive = sampler.check_every, np.flatnonzero(self.job[:n] >= 0)
        job, count = self.job[alive], self.count[alive]
        cells = torch.from_numpy((job * self.columns + count)[:, None] + np.arange(k)).to(sampler.device)
        tokens, logps = sampler.out_tokens[cells].cpu().numpy(), sampler.out_logps[cells].cpu().numpy()
        self.count[alive] = count + k
        stop = np.isin(tokens, self.eos)
        ended = stop.any(1)
        size = np.minimum(np.where(ended, stop.argmax(1) + 1, k), self.budget[job] - count)     # new tokens kept
        valid = np.arange(k) < size[:, None]
        if not np.isfinite(logps[valid]).all():
            row = self.keys[job[np.argmin(np.isfinite(np.where(valid, logps, 0)).all(1))]][2]
            raise ValueError(f"step {self.step}, row {row}: the logits are NaN or infinite")
        if self.on_tokens:
            for j, new, s in zip(job, tokens, size, strict=True):
                self.on_tokens(int(self.prompt[j]), self.keys[j][3], new[:s].tolist())
        finished = np.flatnonzero(ended | (count + k >= self.budget[job]))
        for i in finished:
            j, total = job[i], int(count[i] + size[i])
            cell = slice(j * self.columns, j * self.columns + total)
            kept, logp = (x[cell].tolist() for x in (sampler.out_tokens, sampler.out_logps))
            finish = "stop" if kept[-1] in self.eos else str(self.full[j])
            self.responses[j] = self.responses[j]._replace(tokens=kept, logps=logp, finish=finish)
            self.job[alive[i]] = -1
        return len(finished) > 0


@torch.no_grad()
def generate_reference(model, prompt, row, sample, seed, step, sampling, eos_ids, vocab_limit, max_len=None):
    """The obviously correct slow path: no cache, no batch, the same noise. -> Response"""
    room = (max_len or model.config.max_position_embeddings) - len(prompt)
    budget, tokens, logps = min(sampling.max_new_tokens, room), [], []
    noise = uniforms(seed, step, row, sample, budget)
    while len(tokens) < budget and not (tokens and tokens[-1] in eos_ids):
        logits = model.logits(list(prompt) + tokens)[-1, :vocab_limit].double()
        logp = (logits / (sampling.temperature or 1)).log_softmax(-1)
        ids = logp.argsort(descending=True, stable=True)[:sampling.top_k or None]
        p = logp.exp()[ids]
        if sampling.top_p < 1:
            ids = ids[:1 + int((p.cumsum(-1) < sampling.top_p * p.sum()).sum())]
        ids = ids[:1] if sampling.temperature == 0 else ids.sort().values
        cum = logp.exp()[ids].cumsum(-1)
        tokens.append(int(ids[min(int((cum <= noise[len(tokens)] * cum[-1]).sum()), len(ids) - 1)]))
        logps.append(float(logp[tokens[-1]]))
    finish = "stop" if tokens and tokens[-1] in eos_ids else "length" if budget == sampling.max_new_tokens else "context"
    return Response(row, sample, tokens, logps, finish)


# ------------------------------------------------------------------------------------------------ command line
@dataclasses.dataclass
class Options:
    questions: tuple[str, ...]
    """Asked as one batch; none: one question a line from standard input."""
    model: str = "tiny/model"
    """Folder or hub name."""
    thinking: bool = True
    """Whether the chat template lets the model think first."""
    temperature: float = 1.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Of weights and products; auto: bfloat16 on CUDA, else float32."""


class Printer:
    """Prints responses as they come, one after the other, in whole characters: a token may end inside one."""

    def __init__(self, tokenizer, questions, write):
        self.tokenizer, self.questions, self.write = tokenizer, questions, write
        self.ids, self.done, self.at = [[] for _ in questions], [False] * len(questions), 0
        self.shown = 0              # characters printed of the response at hand
        self._title()

    def _title(self):
        if len(self.questions) > 1:
            self.write(f"> {self.questions[self.at]}\n")

    def tokens(self, prompt, _sample, new, final=False):
        self.ids[prompt] += new
        self.done[prompt] |= final
        if prompt != self.at:
            return
        text = self.tokenizer.decode(self.ids[prompt], skip_special_tokens=True)
        if not self.done[prompt]:
            text = text.rstrip("\ufffd")
        self.write(text[self.shown:])
        self.shown = max(self.shown, len(text))
        if self.done[prompt]:
            self.write("\n")
            self.at, self.shown = self.at + 1, 0
            if self.at < len(self.questions):
                self._title()
                self.tokens(self.at, 0, [])


def main():
    import cli
    import data
    options = cli.parse(Options, __doc__)
    with cli.user_errors():
        sampling = Sampling(options.temperature, options.top_p, options.top_k, options.max_new_tokens)
        questions = list(options.questions) or [line.strip() for line in sys.stdin if line.strip()]
        if not questions:
            raise ValueError("no question: give one as an argument or on standard input")
        dtype = options.dtype if options.dtype != "auto" else "bfloat16" if options.device == "cuda" else "float32"
        model = load_model(options.model, dtype=getattr(torch, dtype), device=options.device)
        folder = local_folder(options.model)
        tokenizer = data.load_tokenizer(folder)
        sampler = Sampler(model, data.eos_ids(folder, tokenizer), data.vocab_limit(tokenizer))
        prompts = [data.prompt_ids(tokenizer, q, options.thinking) for q in questions]
        printer = Printer(tokenizer, questions, lambda text: print(text, end="", flush=True))
        rows = list(range(len(prompts)))
        responses = sampler.generate(prompts, rows, 1, options.seed, 0, sampling, printer.tokens)
    for i, response in enumerate(responses):
        printer.tokens(i, 0, [], final=True)
    s = sampler.stats
    print(f"[{s['decode_tokens']} tokens, {s['decode_tokens'] / max(s['decode_s'], 1e-9):.0f} a second; "
          f"{', '.join(r.finish for r in responses)}]", file=sys.stderr)


if __name__ == "__main__":
    main()
