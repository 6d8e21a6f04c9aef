"""Sampling: KV cache, one prefill per prompt, batched decode with refill; a command line to talk to a model.

    python sample.py --model Qwen/Qwen3-0.6B "What is 17 * 23?"       # one question: prints as it generates
    python sample.py --temperature 0 < questions.txt                  # one question a line, one batch

A token's noise is one float64 uniform, a function of (seed, step, prompt row, sample, position) alone, turned
into an id by the inverse CDF: batch mates, refill and world size change only rounding. Log-probs are the
learner's (`model.token_logp`): softmax over ids < vocab_limit of fp32 logits / temperature, also where top-k
or top-p cut the choice; greedy rows report temperature 1. EOS is kept. Ids are never re-encoded text. The
obviously correct slow path is `generate_reference` in tests/test_sample.py.

Letters in shapes: L layers, n decoded rows, H query heads, G key/value heads, D head size, E hidden size,
V vocabulary, T cache columns in use, P prompt tokens.
"""

import dataclasses
import math
import sys
import time
from collections import deque
from typing import Literal, NamedTuple

import numpy as np
import torch

from fused import Fused, Program, now
from model import Qwen3, attention, load_model, local_folder, pack, rope_tables

BELOW_ONE = 1 - 2.0 ** -52          # the largest u for which u * total always rounds to less than the total
# tokens of one prefill (but for a longer prompt); steps, at most, until somebody looks at the tokens
PACK, LOOK = 1024, 16


# ------------------------------------------------------------------------------------------ requests, results
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to pick tokens. top-k cuts first and keeps exactly k ids, ties by lowest id; top-p then keeps the
    smallest set of the likeliest ids that holds at least that share, never fewer than one."""
    temperature: float = 1.0        # 0 = greedy: the largest logit, lowest id among equals; consumes no noise
    top_p: float = 1.0              # 1 = off
    top_k: int = 0                  # 0 = off
    max_new_tokens: int = 1024      # 0 = empty responses

    def __post_init__(self):
        temperature, top_p, top_k, cap = dataclasses.astuple(self)
        fine = temperature == 0 or 1e-6 <= temperature < math.inf, 0 < top_p <= 1, top_k >= 0, cap >= 0
        for key in (key for key, fits in zip(vars(self), fine, strict=True) if not fits):
            raise ValueError(f"{key} {vars(self)[key]}: temperature 0 or >= 1e-6, top_p in (0, 1], rest >= 0")


class Response(NamedTuple):
    row: int
    sample: int
    tokens: list
    logps: list
    finish: str         # "stop": EOS is the last token | "length": max_new_tokens | "context": no room left


def uniforms(seed, step, row, sample, count):
    """The first `count` draws in [0, 1) of one response. Philox is a counter-based generator: (seed, step) is
    its key and (row, sample) the upper half of its counter, so no two responses share a stream."""
    bits = np.random.Philox(counter=[0, 0, row, sample], key=[seed, step])
    return np.minimum(np.random.Generator(bits).random(count), BELOW_ONE)


# --------------------------------------------------------------------------------------------- picking tokens
def inverse_cdf(do, p, u, chunk, limit, out):
    """First id whose cumulative probability exceeds u * total. p [n,V] fp32, V a multiple of `chunk`, p = 0
    from `limit` on; u [n,1] float64, at most BELOW_ONE -> out [n,1]. Of several chunks one is chosen first,
    by their sums (fp32, since a float64 copy of p would cost more than the rest) accumulated in float64, so
    that V is read once. An id with p = 0 never moves a cumulative sum and so is never the first to exceed
    anything; the target stays below the total. Only NaN can reach the clamps. (`do`: see fused.py)"""
    chunks, wide = p.view(len(p), -1, chunk), {"dtype": torch.float64, "device": p.device}
    inside, (target, before, end) = torch.empty(len(p), chunk, **wide), u.new_empty(3, *u.shape)
    if chunks.shape[1] == 1:
        do(torch.cumsum, p, -1, dtype=torch.float64, out=inside)
        do(torch.mul, inside[:, -1:], u, out=target)
        do(torch.searchsorted, inside, target, right=True, out=out)
    else:
        sums, cum = torch.empty_like(chunks[:, :, 0]), torch.zeros(len(p), chunks.shape[1] + 1, **wide)
        c, chosen = torch.empty_like(out), torch.empty_like(chunks[:, :1])
        do(torch.sum, chunks, -1, out=sums)
        do(torch.cumsum, sums, -1, dtype=torch.float64, out=cum[:, 1:])             # cum begins with a 0
        do(torch.mul, cum[:, -1:], u, out=target)
        do(torch.searchsorted, cum, target, right=True, out=c)
        do(c.sub_, 1)
        do(c.clamp_, max=chunks.shape[1] - 1)
        do(torch.gather, chunks, 1, c[:, :, None].expand(-1, -1, chunk), out=chosen)
        do(torch.cumsum, chosen[:, 0], -1, dtype=torch.float64, out=inside)
        do(torch.gather, cum, 1, c, out=before)
        do(target.sub_, before)
        do(torch.mul, inside[:, -1:], BELOW_ONE, out=end)
        do(torch.minimum, target, end, out=target)
        do(torch.searchsorted, inside, target, right=True, out=out)
        do(out.add_, c, alpha=chunk)
    do(out.clamp_, max=limit - 1)


def truncate(p, top_k, top_p):
    """p [n,V] with 0 outside top-k, then top-p; rows whose k covers all ids with p > 0 and
    whose top_p is 1 stay as they are."""
    ordered, ids = p.sort(dim=-1, descending=True, stable=True)
    keep = torch.arange(p.shape[1], device=p.device) < top_k                                         # [n,V]
    cum = (ordered.double() * keep).cumsum_(-1)
    keep &= (cum - ordered < top_p * cum[:, -1:]) | (top_p >= 1)
    keep[:, 0] = True
    return p * torch.zeros_like(keep).scatter_(1, ids, keep)


# ---------------------------------------------------------------------------------------------------- sampler
def bucket(n):
    """n rounded up to 1, 2, 4 or a multiple of 8: few shapes, so few programs."""
    return n if n < 3 else 4 if n < 5 else -(-n // 8) * 8


def cuda_capture(program):
    """Records `program` as a CUDA graph and returns its replay, which needs the program's memory: keep it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        program()
    return graph.replay


class Sampler:
    """Static slots: row i of every buffer is slot i. A finished row gives its slot to a waiting one; when
    nobody waits, the last rows move into the holes. So a step runs on views [:n] and, between checks, without
    host synchronization.

    eos_ids: every id that ends a response. vocab_limit: ids from it on are never sampled. slots: rounded up
    by `bucket`. dtype: of weights, activations and cache, fp32 or 16 bits; default bfloat16 on CUDA, else the
    model's. max_len: of prompt + response, default the model's.
    """

    def __init__(self, model: Qwen3, eos_ids, vocab_limit, slots=32, dtype=None, max_len=None):
        if vocab_limit < 1 or slots < 1:
            raise ValueError(f"vocab_limit {vocab_limit} and slots {slots} must be positive")
        self.config, self.device, cuda = model.config, model.head_weight.device, model.head_weight.is_cuda
        self.dtype = dtype or (torch.bfloat16 if cuda else model.head_weight.dtype)
        self.vocab_limit, self.eos_ids = min(vocab_limit, self.config.vocab_size), frozenset(eos_ids)
        self.max_len, self.slots = max_len or self.config.max_position_embeddings, slots
        # decoding steps between two checks; T is a multiple of `columns`
        self.check_every, self.columns, self.capture = (LOOK, 256, cuda_capture) if cuda else (1, 16, None)
        self.fused, self.size, self.stats = Fused(model, self.vocab_limit, self.dtype), (0, 0, 0), {}

    def refresh(self):
        """Takes over the model's current weights. Call after every optimizer step."""
        self.fused.refresh()

    def _allocate(self, *need):
        """Buffers for (slots, cache columns of each, tokens of all responses), kept while large enough."""
        if all(have >= want for have, want in zip(self.size, need, strict=True)):
            return
        slots, length, cells = size = tuple(map(max, self.size, need))
        self.size = 0, 0, 0                                             # until all of it is there
        c, dev, g = self.config, self.device, self.config.num_key_value_heads
        self.cache, self.programs, self.graphs = None, {}, {}           # freed before the larger one comes
        self.cache = torch.zeros(c.num_hidden_layers, 2, slots, g, length, c.head_dim, dtype=self.dtype,
                                 device=dev)
        first = torch.arange(2 * slots * g, device=dev).view(2, slots, g) * length
        self.first_place = first.permute(1, 2, 0).contiguous()  # where a slot's k and v heads begin
        self.cis = torch.complex(*rope_tables(c, length, dev))[:, None, None]                   # [T,1,1,D/2]
        self.state = torch.zeros(2, slots, dtype=torch.int64, device=dev)   # position; cell in tokens, probs
        self.live, self.token = torch.zeros_like(self.state)                # live: 1 while the row counts
        # memory: `arena` of the programs, `packed` of prefill (kept: from the system it comes page by page)
        self.span, self.arena, self.packed = torch.arange(length, device=dev), {}, {}   # x of arena: hidden
        self.hidden = self.fused.buffers(self.arena, slots, length).x.zero_()
        self.logits, self.p = torch.empty(2, slots, self.fused.width, device=dev)
        # temperature, top_k, top_p, whether greedy; the probability of the last token
        self.options, self.chosen = torch.ones(4, slots, 1, device=dev), torch.ones(slots, device=dev)
        self.tokens, self.probs, self.noise = (torch.zeros(cells + 1, dtype=t, device=dev)
                                               for t in (torch.int64, torch.float32, torch.float64))
        self.size = size

    # ---- the two halves of a step, as programs on rows [:n] of static buffers
    def _pick(self, n, scaled, greedy, truncated):
        """Program: hidden [n,E] -> the next token and its probability, to `token` and the row's cell."""
        program, fused, cell, token = Program(), self.fused, self.state[1, :n], self.token[:n]
        do, logits, p, u = program.do, self.logits[:n], self.p[:n], self.noise.new_empty(n, 1)
        kept, chosen, (temperature, top_k, top_p, is_greedy) = p, self.chosen[:n, None], self.options[:, :n]
        fused.logits(do, fused.buffers(self.arena, n), logits)
        if scaled:
            do(logits.div_, temperature)
        do(torch.softmax, logits, -1, out=p)
        if truncated:
            kept = torch.empty_like(p)
            do(lambda: kept.copy_(truncate(p, top_k, top_p)))
        do(torch.index_select, self.noise, 0, cell, out=u.view(-1))
        inverse_cdf(do, kept, u, fused.chunk, self.vocab_limit, token[:, None])
        if greedy:
            do(lambda: token.copy_(torch.where(is_greedy[:, 0] > 0, logits.argmax(-1), token)))
        do(torch.gather, p, 1, token[:, None], out=chosen)
        do(self.probs.index_copy_, 0, cell, chosen.view(-1))
        do(self.tokens.index_copy_, 0, cell, token)
        return program

    def _forward(self, n, used):
        """Program: token [n] -> hidden [n,E]; keys and values go to each row's position, all below `used`;
        then position and cell advance."""
        program, fused, s = Program(), self.fused, self.fused.buffers(self.arena, n, used)
        do, position, place = program.do, self.state[0, :n], torch.empty_like(self.first_place[:n])
        do(torch.add, self.first_place[:n], position[:, None, None], out=place)                    # [n,G,2]
        do(torch.index_select, self.cis, 0, position, out=s.cis)
        fused.see(do, s, position, self.span[:used])
        fused.embed(do, s, self.token[:n])
        for layer, cache in zip(fused.layers, self.cache, strict=True):
            fused.project(do, s, layer)
            do(cache.view(-1, self.config.head_dim).index_put_, (place,), s.qkv[:, :, -2:])
            fused.attend(do, s, *cache[:, :n, :, :used], position)
            fused.finish(do, s, layer)
        do(self.state[:, :n].add_, self.live[:n])
        return program

    def _launch(self, build, *key):
        """Runs the program build(*key), built once; on CUDA from its second run on as a captured graph."""
        name = build.__name__, *key
        program = self.programs.get(name)               # its first run is the warm-up that a capture needs
        if program and self.capture and name not in self.graphs:
            self.graphs[name] = self.capture(program)
        self.programs[name] = program = program or build(*key)
        self.graphs.get(name, program)()

    # ---- prefill and admission
    def _prefill(self, run, p):
        """Runs prompt p, packed with the next ones (up to PACK tokens), unless that was done before.
        -> its keys and values [L,2,G,P,D] and last hidden state [E]"""
        if p not in run.prefilled:
            began, c, fused, last = time.perf_counter(), self.config, self.fused, p + 1
            while last < len(run.prompts) and sum(map(len, run.prompts[p:last + 1])) <= PACK:
                last += 1
            batch = pack(run.prompts[p:last], [], []).to(self.device)
            tails, n = (torch.tensor(batch.q_lens).cumsum(0) - 1).to(self.device), len(batch.tokens)
            kept = self.packed if n <= PACK else {}             # the memory of a longer prompt is given back
            kvs = fused.take(kept, "kv", c.num_hidden_layers, 2, c.num_key_value_heads, n, c.head_dim)
            s = fused.buffers(kept, n)
            torch.index_select(self.cis, 0, batch.positions, out=s.cis)
            fused.embed(now, s, batch.tokens)
            for layer, kv in zip(fused.layers, kvs, strict=True):
                fused.project(now, s, layer)
                kv.copy_(s.qkv[:, :, -2:].permute(2, 1, 0, 3))
                y = attention(s.q.flatten(1, 2), s.k, s.v, batch).view(len(s.q), *s.q.shape[1:])
                if layer is fused.layers[-1]:
                    x, y, s = s.x[tails], y[tails], fused.buffers(kept, len(tails))
                    s.x.copy_(x)
                s.attended = y
                fused.finish(now, s, layer)
            run.prefilled = dict(enumerate(zip(kvs.split(batch.q_lens, 3), s.x, strict=True), p))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.stats["prefill_tokens"] += len(batch.tokens)
            self.stats["prefill_s"] += time.perf_counter() - began
        return run.prefilled[p]

    def _admit(self, run):
        """Waiting requests take free slots: cache, state, and the noise of the whole response."""
        slots = np.flatnonzero(run.job < 0)[:len(run.waiting)]
        if not len(slots):
            return
        jobs, noise = np.array([run.waiting.popleft() for _ in slots]), np.zeros((len(slots), run.stride))
        for job, slot, u in zip(jobs, slots, noise, strict=True):
            kv, self.hidden[slot] = self._prefill(run, run.prompt[job])
            self.cache[:, :, slot, :, :kv.shape[3]] = kv
            if not run.options[3, job]:                                             # greedy draws nothing
                u[:run.budget[job]] = uniforms(*run.keys[job], run.budget[job])
        state = run.place(slots, jobs)
        slots, jobs, state, options, noise = (
            torch.from_numpy(x).to(self.device) for x in (slots, jobs, state, run.options[:, jobs], noise))
        self.live[slots], self.state[:, slots], self.options[:, slots] = 1, state, options
        self.noise[:run.cells].view(-1, run.stride)[jobs] = noise

    def _compact(self, run, n):
        """Finished rows stop counting; with nobody waiting the last rows move into the holes. -> rows left"""
        alive = np.flatnonzero(run.job >= 0)
        self.live[:n] = torch.from_numpy((run.job[:n] >= 0).astype(np.int64)).to(self.device)
        size = bucket(len(alive))
        if size >= n or size and run.waiting:
            return n
        movers = alive[alive >= size]
        holes = np.flatnonzero(run.job[:size] < 0)[:len(movers)]
        src, dst = (torch.from_numpy(i).to(self.device) for i in (movers, holes))
        self.cache[:, :, dst] = self.cache[:, :, src]
        self.state[:, dst], self.options[:, dst] = self.state[:, src], self.options[:, src]
        self.live[dst], self.token[dst] = self.live[src], self.token[src]
        for array in (run.job, run.cell, run.left):
            array[holes] = array[movers]
        run.job[movers] = -1
        run.measure()
        return size

    # ---- the loop
    @torch.inference_mode()
    def generate(self, prompts, rows, samples, seed, step, sampling, on_tokens=None):
        """`samples` responses to each prompt (ids), ordered by prompt, then sample. `rows` name the prompts
        in the noise key. `sampling`: one for all, or one per prompt. on_tokens(prompt, sample, new tokens) is
        called as they come. ValueError: an empty or too long prompt, NaN or infinite logits. Sets `stats`:
        prefill_tokens, prefill_s, decode_tokens (with the first), decode_s (the rest), decode_steps."""
        run = _Run(self, prompts, rows, samples, seed, step, sampling, on_tokens)
        self.stats = dict(prefill_tokens=0, prefill_s=0.0, decode_tokens=0, decode_s=0.0, decode_steps=0)
        began = time.perf_counter()
        if run.waiting:
            self._allocate(len(run.job), run.longest, run.cells)
            self.live.zero_()
            self.state[1] = len(self.tokens) - 1            # slots without a row write where nobody reads
        while run.waiting or run.used:                              # used: 0 without a row
            if run.waiting:
                self._admit(run)
            n = run.n
            for i in range(self.check_every):
                self._launch(self._pick, n, *run.flags)
                used = run.used + i + 1                     # columns of the longest row after this step
                if i == self.check_every - 1 and run.check(self, n):
                    n = self._compact(run, n)
                if n:
                    step = max(self.columns, 2 ** (used.bit_length() - 4))      # long rows: few programs
                    used = min(-(-used // step) * step, self.size[1])
                    self._launch(self._forward, n, used)
                self.stats["decode_steps"] += 1
        self.stats["decode_s"] = time.perf_counter() - began - self.stats["prefill_s"]
        self.stats["decode_tokens"] = sum(len(r.tokens) for r in run.responses)
        return run.responses


class _Run:
    """The host's side of one `generate`: who waits, who sits in which slot, what is finished."""

    def __init__(self, sampler, prompts, rows, samples, seed, step, sampling, on_tokens):
        per_prompt = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if not len(prompts) == len(rows) == len(per_prompt):
            raise ValueError(f"{len(prompts)} prompts, {len(rows)} rows, {len(per_prompt)} sampling options")
        for row, ids in zip(rows, prompts, strict=True):
            if not 0 < len(ids) <= sampler.max_len:
                raise ValueError(f"row {row}: a prompt of {len(ids)} tokens; it takes 1 to {sampler.max_len}")
        self.prompts, self.on_tokens, self.step = prompts, on_tokens, step
        self.prompt = np.repeat(np.arange(len(prompts)), samples)               # of each request ("job")
        self.prompt_len = np.array([len(ids) for ids in prompts], dtype=np.int64)[self.prompt]
        caps = np.array([s.max_new_tokens for s in per_prompt], dtype=np.int64)[self.prompt]
        self.budget = np.minimum(caps, sampler.max_len - self.prompt_len)
        self.capped = np.where(self.budget < caps, "context", "length").tolist()
        self.keys = [(seed, step, row, sample) for row in rows for sample in range(samples)]
        self.responses = [Response(*k[2:], [], [], e) for k, e in zip(self.keys, self.capped, strict=True)]
        options = [(s.temperature or 1, s.top_k or sampler.vocab_limit, s.top_p, s.temperature == 0)
                   for s in per_prompt]
        self.options = np.array(options, dtype=np.float32).reshape(-1, 4)[self.prompt].T[:, :, None]
        temperature, top_k, top_p, greedy = self.options
        self.flags = tuple(bool(flag.any()) for flag in (           # of `_pick`, which skips what is off
            temperature != 1, greedy, (top_p < 1) | (top_k < sampler.vocab_limit)))
        self.stride = int(self.budget.max(initial=0)) + LOOK                     # rows overshoot until a look
        self.longest = -(-int((self.prompt_len + self.budget).max(initial=0) + LOOK) // 64) * 64
        self.cells = len(self.keys) * self.stride
        self.waiting = deque(np.flatnonzero(self.budget > 0).tolist())
        slots = bucket(min(sampler.slots, len(self.waiting))) if self.waiting else 0
        # job j owns the cells from j * stride of tokens, probabilities and noise
        # of each slot: its job (-1: free), the next cell of that job, how many tokens may still come
        self.job, self.cell, self.left = np.full(slots, -1), np.zeros(slots, int), np.zeros(slots, int)
        self.prefilled, self.lag = {}, 0        # lag: steps since the last look, which `cell` and `left` lack
        self.measure()

    def place(self, slots, jobs):
        """Jobs take slots. -> what the device keeps of each: position and cell"""
        self.job[slots], self.cell[slots], self.left[slots] = jobs, jobs * self.stride, self.budget[jobs]
        self.measure()
        return np.stack([self.prompt_len[jobs], self.cell[slots]])

    def measure(self):
        self.alive = self.job >= 0
        self.n = bucket(1 + int(np.flatnonzero(self.alive).max(initial=-1)))
        self.least = int(self.left[self.alive].min(initial=2 ** 40))
        held = self.prompt_len[self.job] + self.budget[self.job] - self.left
        self.used = int(held[self.alive].max(initial=0))    # cache columns that the longest row holds

    def check(self, sampler, n):
        """Looks at the tokens since the last look; finished rows give up their slots. -> whether any did.
        When every step is checked, most checks only ask whether it brought an end or NaN."""
        job, alive, k = self.job[:n], self.alive[:n], sampler.check_every
        self.lag, self.used, self.least = self.lag + k, self.used + k, self.least - k
        if k == 1 and self.lag < LOOK and self.least > 0 and not self.on_tokens:
            if sampler.eos_ids.isdisjoint(sampler.token[:n].tolist()) and sum(sampler.chosen.tolist()) > 0:
                return False
        k, self.lag = self.lag, 0
        cells = torch.from_numpy(self.cell[:n, None] + np.arange(k)).to(sampler.device)
        tokens, probs = sampler.tokens[cells].cpu().numpy(), sampler.probs[cells].cpu().numpy()
        stop = np.isin(tokens, list(sampler.eos_ids)) & alive[:, None]
        ended = stop.any(1)
        size = np.minimum(np.where(ended, stop.argmax(1) + 1, k), self.left[:n]) * alive    # new tokens kept
        self.cell[:n] += size
        self.left[:n] -= size
        bad = (~(probs > 0) & (np.arange(k) < size[:, None])).any(1)
        if bad.any():
            row, sampler.size = self.keys[job[bad.argmax()]][2], (0, 0, 0)     # NaN would stay in the cache
            raise ValueError(f"step {self.step}, row {row}: the logits are NaN or infinite")
        for i in np.flatnonzero(alive) if self.on_tokens else ():
            self.on_tokens(int(self.prompt[job[i]]), self.keys[job[i]][3], tokens[i, :size[i]].tolist())
        done = alive & (ended | (self.left[:n] == 0))
        for i in np.flatnonzero(done):
            j, cell = job[i], slice(job[i] * self.stride, self.cell[i])
            finish = "stop" if stop[i, size[i] - 1] else self.capped[j]
            self.responses[j] = self.responses[j]._replace(
                tokens=sampler.tokens[cell].tolist(), logps=sampler.probs[cell].log().tolist(), finish=finish)
        job[done] = -1
        self.measure()
        return bool(done.any())


# ----------------------------------------------------------------------------------------------- command line
@dataclasses.dataclass
class Options:
    questions: tuple[str, ...]      # asked as one batch; none: one question a line from standard input
    model: str = "tiny/model"       # folder or hub name
    thinking: bool = True           # --no-thinking: the prompt closes the think block
    temperature: float = 1.0        # 0 = greedy
    top_p: float = 1.0              # 1 = off
    top_k: int = 0                  # 0 = off
    max_new_tokens: int = 1024      # cap of a response
    seed: int = 0                   # sampling noise
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"


def main():
    from transformers import TextStreamer

    import cli
    import data
    o = cli.parse(Options, __doc__)
    with cli.user_errors():
        sampling = Sampling(o.temperature, o.top_p, o.top_k, o.max_new_tokens)
        questions = list(o.questions) or [line.strip() for line in sys.stdin if line.strip()]
        if not questions:
            raise ValueError("no question: give one as an argument or on standard input")
        folder = local_folder(o.model)
        tokenizer = data.load_tokenizer(folder)
        prompts = [data.prompt_ids(tokenizer, question, o.thinking) for question in questions]
        model = load_model(folder, getattr(torch, o.dtype), o.device)
        sampler = Sampler(model, data.eos_ids(folder, tokenizer), data.vocab_limit(tokenizer))
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)            # whole characters only
        responses = sampler.generate(prompts, range(len(prompts)), 1, o.seed, 0, sampling, (
            lambda _prompt, _sample, new: streamer.put(torch.tensor(new))) if len(prompts) == 1 else None)
    if len(prompts) == 1:
        streamer.end()
    else:
        for question, r in zip(questions, responses, strict=True):
            print(f"> {question}\n{tokenizer.decode(r.tokens, skip_special_tokens=True)}")
    speed = sampler.stats["decode_tokens"] / max(sampler.stats["decode_s"], 1e-9)
    print(f"[{'; '.join(f'{len(r.tokens)} tokens, {r.finish}' for r in responses)}; {speed:.0f} tokens/s]",
          file=sys.stderr)


if __name__ == "__main__":
    main()
