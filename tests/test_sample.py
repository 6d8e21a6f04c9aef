"""The sampler against the slow path, the learner, exact arithmetic and chi-square; every row of the sampler's
known faults; refill, compaction and graph logic; what the command line prints."""

import contextlib
import dataclasses
import itertools
import math
import random
import sys
import weakref

import numpy as np
import pytest
import torch
from transformers import TextStreamer

import data
import fused as fused_file
import reward
import sample as sample_file
from fused import Fused, now
from model import ModelConfig, Qwen3, load_model, pack
from sample import (
    BELOW_ONE,
    Response,
    Sampler,
    Sampling,
    inverse_cdf,
    truncate,
    uniforms,
)

BASE = {"model_type": "qwen3", "vocab_size": 131, "hidden_size": 46, "intermediate_size": 57,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 97, "tie_word_embeddings": True}
CONFIGS = {"tied, batched products": {},
           "untied, 4 query heads per key, wide heads": {
               "tie_word_embeddings": False, "num_attention_heads": 8, "head_dim": 130, "vocab_size": 137}}
SMALL = {"num_hidden_layers": 2, "hidden_size": 22, "num_attention_heads": 2, "num_key_value_heads": 1}
LIMIT = 127                             # ids 127.. exist in the output layer only
LENGTHS = 3, 1, 17, 9, 1, 32, 5, 11, 2, 7, 50
MIXED = [Sampling(max_new_tokens=23), Sampling(0, max_new_tokens=13), Sampling(0.7, max_new_tokens=71),
         Sampling(1.3, top_p=0.8, max_new_tokens=29), Sampling(1, top_k=3, max_new_tokens=19),
         Sampling(0.9, top_p=0.6, top_k=7, max_new_tokens=1)]


def build(seed=0, scale=1.0, **changes):
    model = Qwen3(ModelConfig.from_dict({**BASE, **changes}))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = 1 + 0.3 * noise if p.ndim == 1 else noise * scale / p.shape[1] ** 0.5
    return model


def random_prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(LIMIT) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return build(**request.param)


@pytest.fixture(scope="module")
def tiny():
    return build(**SMALL)


@pytest.fixture(params=[(), (torch.bfloat16,), (torch.bfloat16, torch.float32)],
                ids=["oneDNN", "oneDNN without bf16", "no oneDNN"])
def onednn(request, monkeypatch):
    """As on a processor, or in a build of PyTorch, without these products (this one may lack some itself)."""
    has = fused_file.onednn
    monkeypatch.setattr(fused_file, "onednn", lambda dtype=torch.float32: (
        None if dtype in request.param else has(dtype)))


def scripted(sequences, tiny, eos=(), prompt=(5, 6), check_every=1, table=None, sampling=None):
    """Responses of a sampler whose logits are set by hand: request i prefers sequences[i] token after token,
    or always has the logits table[i]."""
    sampler = Sampler(tiny, eos, LIMIT, slots=len(sequences))
    sampler.check_every = check_every
    caps = [sampling] if isinstance(sampling, Sampling) else sampling
    columns = max(s.max_new_tokens for s in caps) + sample_file.LOOK

    def logits(out):
        out.fill_(-torch.inf)
        for i, (position, cell) in enumerate(zip(*sampler.state[:, :len(out)].tolist(), strict=True)):
            request = min(cell // columns, len(sequences) - 1)          # a slot without a row: any
            if table:
                out[i, :LIMIT] = torch.tensor(table[request])
            else:
                sequence = sequences[request]
                out[i, sequence[max(min(position - len(prompt), len(sequence) - 1), 0)]] = 99.0

    sampler.fused = Fused(tiny, LIMIT, torch.float32, chunk=16)
    sampler.fused.logits = lambda do, s, out: do(logits, out)
    return sampler.generate([list(prompt)] * len(sequences), range(len(sequences)), 1, 0, 0, sampling)


def compare(response, expected, tolerance=2e-5):
    assert response[:3] == expected[:3] and response.finish == expected.finish
    np.testing.assert_allclose(response.logps, expected.logps, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------- fast path = slow path
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
        cum = logp[ids].exp().cumsum(-1)
        ids = ids[:1 + int((cum < sampling.top_p * cum[-1]).sum())] if sampling.top_p < 1 else ids
        ids = ids[:1] if sampling.temperature == 0 else ids.sort().values
        cum = logp[ids].exp().cumsum(-1)
        tokens.append(int(ids[min(int((cum <= noise[len(tokens)] * cum[-1]).sum()), len(ids) - 1)]))
        logps.append(float(logp[tokens[-1]]))
    finish = "length" if budget == sampling.max_new_tokens else "context"
    return Response(row, sample, tokens, logps, "stop" if tokens and tokens[-1] in eos_ids else finish)


def frequent_ids(responses, count):
    ids, counts = np.unique([t for r in responses for t in r.tokens], return_counts=True)
    return ids[np.argsort(-counts)][:count].tolist()


@pytest.mark.parametrize("check_every, columns", [(1, 16), (5, 32)], ids=["CPU", "as on CUDA"])
def test_equals_the_slow_path(model, check_every, columns):
    """Ragged prompts (one token, a whole bucket), refill, cap, context, two EOS ids, mixed ways to pick."""
    prompts = random_prompts(LENGTHS)
    picks = [MIXED[i % len(MIXED)] for i in range(len(prompts))]
    sampler, captured = Sampler(model, [], LIMIT, slots=5, max_len=53), []
    sampler.check_every, sampler.columns = check_every, columns
    if check_every > 1:     # ids in chunks, PyTorch's attention, and a stand-in for CUDA graphs
        sampler.fused = Fused(model, LIMIT, torch.float32, chunk=16)
        sampler.fused.products = False

        def capture(program):           # as CUDA does it: keeps the memory that the program uses, not the program
            captured.append(weakref.ref(program))
            return lambda ref=captured[-1]: ref()()
        sampler.capture = capture
    eos = frequent_ids(sampler.generate(prompts, range(20, 31), 3, 1, 2, picks), 2)
    sampler.eos_ids = frozenset(eos)
    streamed = {}
    responses = sampler.generate(prompts, range(20, 31), 3, 1, 2, picks,
                                 on_tokens=lambda p, s, new: streamed.setdefault((p, s), []).extend(new))
    finishes = set()
    for (p, s), response in zip(itertools.product(range(11), range(3)), responses, strict=True):
        compare(response, generate_reference(model, prompts[p], 20 + p, s, 1, 2, picks[p], eos, LIMIT, 53))
        assert streamed[p, s] == response.tokens and type(response.tokens[0]) is int
        finishes.add((response.finish, response.tokens[-1] if response.finish == "stop" else None))
    assert finishes == {("stop", eos[0]), ("stop", eos[1]), ("length", None), ("context", None)}
    assert sampler.stats["prefill_tokens"] == sum(LENGTHS)          # once, though refill splits groups
    assert sampler.stats["decode_tokens"] == sum(len(r.tokens) for r in responses)
    assert bool(captured) == (check_every > 1)


def test_logps_are_the_learners(model):
    prompts = random_prompts(LENGTHS)
    for temperature in (1.0, 0.6):
        responses = Sampler(model, [3], LIMIT, slots=64).generate(
            prompts, range(11), 2, 0, 0, Sampling(temperature, max_new_tokens=31))
        batch = pack(prompts, [i // 2 for i in range(22)], [r.tokens for r in responses])
        with torch.no_grad():
            logp = model(batch, temperature, LIMIT)[0]
        ours = torch.tensor([x for r in responses for x in r.logps])
        torch.testing.assert_close(ours, logp, rtol=0, atol=1e-5 / temperature)    # an error of the logits
        assert all(len(r.tokens) == len(r.logps) for r in responses)


def test_logps_of_the_embedded_model_are_as_exact_as_the_learners():
    """Against fp64: the logits of a trained model are larger, so fp32 itself is off by up to 1e-5 there."""
    folder = "tiny/model"
    model, tokenizer = load_model(folder), data.load_tokenizer(folder)
    problems = data.load_problems("tiny/train.jsonl", read_label=reward.read_label)
    prompts = [data.prompt_ids(tokenizer, problems[i].question) for i in range(37)]
    limit = data.vocab_limit(tokenizer)
    responses = Sampler(model, data.eos_ids(folder, tokenizer), limit, slots=23).generate(
        prompts, range(37), 5, 0, 0, Sampling(max_new_tokens=61))
    batch = pack(prompts, [i // 5 for i in range(185)], [r.tokens for r in responses])
    with torch.no_grad():
        learner, exact = model(batch, 1.0, limit)[0].double(), model.double()(batch, 1.0, limit)[0]
    ours = torch.tensor([x for r in responses for x in r.logps], dtype=torch.float64)
    off, off_learner, gap = (ours - exact).abs(), (learner - exact).abs(), (ours - learner).abs()
    assert exact.dtype == torch.float64 and len(exact) > 2000
    assert off.mean() < 1.5 * off_learner.mean() and off.max() < 4e-5, (off.mean(), off.max())
    assert gap.mean() < 5e-7 and (gap < 1e-5).double().mean() > 0.999


def test_cut_choices_report_the_full_distribution(tiny):
    """Documented: with top-k or top-p the log-prob is that of the softmax, not of what was left of it."""
    sampler = Sampler(tiny, [], LIMIT)
    full, cut = (sampler.generate([[4, 5]], [0], 40, 0, 0, Sampling(1, 1, k, 1)) for k in (0, 2))
    known = {r.tokens[0]: r.logps[0] for r in full}
    shared = [r for r in cut if r.tokens[0] in known]
    assert shared and all(abs(r.logps[0] - known[r.tokens[0]]) < 1e-6 for r in shared)
    assert len({r.tokens[0] for r in cut}) == 2


def test_bf16_stays_near_fp32(model, onednn):
    """The gap is that of bf16 itself: about what the learner under autocast shows on the same tokens."""
    prompts = random_prompts((3, 8, 5))
    responses = Sampler(model, [], LIMIT, dtype=torch.bfloat16).generate(
        prompts, range(3), 4, 0, 0, Sampling(max_new_tokens=17))
    batch = pack(prompts, [i // 4 for i in range(12)], [r.tokens for r in responses])
    ours = torch.tensor([x for r in responses for x in r.logps])
    with torch.no_grad():
        exact = model(batch, 1.0, LIMIT)[0]
        with torch.autocast("cpu", torch.bfloat16):
            learner = model(batch, 1.0, LIMIT)[0]
    noise = (learner - exact).abs().mean()
    assert 0 < (ours - exact).abs().mean() < 2 * noise and (ours - learner).abs().mean() < 2 * noise


def test_bf16_logits_are_fp32_products_of_rounded_operands(tiny):
    """As the learner's: neither the last hidden state nor the logits keep more or fewer digits."""
    fused, out = Fused(tiny, LIMIT, torch.bfloat16, chunk=16), torch.empty(5, 128)
    x = torch.randn(5, 22, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        s = fused.buffers({}, 5)
        s.x.copy_(x)
        fused.logits(now, s, out)
        h = tiny.model.norm(x)
        expected = h.float() @ tiny.head_weight[:LIMIT].bfloat16().float().T
    assert h.dtype == torch.bfloat16 and (out[:, LIMIT:] == -torch.inf).all()
    torch.testing.assert_close(out[:, :LIMIT], expected, rtol=0, atol=2e-6)


def test_bf16_products_are_rounded_once(onednn):
    """To bf16 from fp32 sums, also onto a residual, for few rows and for many."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 31, 46, generator=generator).bfloat16()
    for rows in (7, 301):
        x, old = (torch.randn(rows, n, generator=generator).bfloat16() for n in (46, 62))
        exact = x.double() @ w.double().flatten(0, 1).T
        for add, expected in ((False, exact), (True, exact + old.double())):
            out = old.clone()
            fused_file.product(now, x, fused_file.laid_out(w), out, add)
            torch.testing.assert_close(out.double(), expected, rtol=2.0 ** -8, atol=1e-5)


def test_rotary_tables_are_fp32_in_a_bf16_sampler(tiny):
    sampler = Sampler(build(max_position_embeddings=1200), [], LIMIT, dtype=torch.bfloat16)
    sampler.generate([[3] * 1100], [0], 1, 0, 0, Sampling(max_new_tokens=1))
    frequency = 1e4 ** (-torch.arange(0, 14, 2, dtype=torch.float64) / 14)
    for position in (256, 257, 1023):
        exact = torch.polar(torch.ones(7, dtype=torch.float64), position * frequency)
        assert (sampler.cis[position, 0, 0].to(torch.complex128) - exact).abs().max() < 1e-5
    assert not torch.equal(sampler.cis[256], sampler.cis[257])


# ------------------------------------------------------------------------------------------------ invariance
@pytest.fixture(scope="module")
def thousand(tiny):
    """1,000 responses of 200 prompts in one batch of a thousand slots."""
    prompts = random_prompts([1 + i % 13 for i in range(200)], seed=1)
    eos = [0, 1, 2, 3]
    return prompts, eos, Sampler(tiny, eos, LIMIT, slots=1000).generate(
        prompts, range(200), 5, 7, 3, Sampling(max_new_tokens=21))


def test_refill_and_batch_change_nothing(tiny, thousand):
    prompts, eos, responses = thousand
    refilled = Sampler(tiny, eos, LIMIT, slots=37).generate(prompts, range(200), 5, 7, 3,
                                                            Sampling(max_new_tokens=21))
    assert sum(a.tokens != b.tokens for a, b in zip(responses, refilled, strict=True)) <= 1  # a tie
    assert {r.finish for r in responses} == {"stop", "length"}
    lone = Sampler(tiny, eos, LIMIT, slots=3)
    for p, s in ((0, 0), (7, 4), (111, 2), (199, 3)):
        alone = lone.generate([prompts[p]], [p], s + 1, 7, 3, Sampling(max_new_tokens=21))
        compare(alone[s], responses[5 * p + s], 1e-4)
    order = random.Random(0).sample(range(200), 67)     # any subset, any order, as ranks split them
    part = Sampler(tiny, eos, LIMIT, slots=64).generate([prompts[p] for p in order], order, 5, 7, 3,
                                                        Sampling(max_new_tokens=21))
    expected = [responses[5 * p + s] for p in order for s in range(5)]
    assert sum(a.tokens != b.tokens for a, b in zip(part, expected, strict=True)) <= 1


def test_batch_mates_of_equal_shape_change_no_bit(model):
    a, b, c = random_prompts((9, 9, 9), seed=3)
    sampler = Sampler(model, [], LIMIT)
    one, other = (sampler.generate([a, mate], [0, row], 2, 0, 0, Sampling(max_new_tokens=15))[:2]
                  for mate, row in ((b, 1), (c, 2)))
    assert one == other
    assert sampler.generate([a, c], [0, 2], 2, 0, 0, Sampling(max_new_tokens=15))[:2] == one


def test_ragged_prompts_do_not_share_positions(model):
    short, long = random_prompts((3, 9), seed=4)
    both = Sampler(model, [], LIMIT).generate([short, long], [0, 1], 1, 0, 0, Sampling(0, max_new_tokens=16))
    for row, prompt in enumerate((short, long)):
        alone = Sampler(model, [], LIMIT).generate([prompt], [row], 1, 0, 0, Sampling(0, max_new_tokens=16))
        compare(both[row], alone[0], 1e-4)


def test_one_token_after_a_cache_sees_the_whole_cache(model):
    """Prefill of 6, one token decoded: the logits of a forward over 7; three after a cache of 4 too."""
    ids = random_prompts((7,), seed=5)[0]
    for cached in (6, 4):
        sampler = Sampler(model, [], LIMIT)
        sampler.generate([ids[:cached]], [0], 1, 0, 0, Sampling(0, max_new_tokens=4))
        with torch.inference_mode():
            sampler.live[:1], sampler.state[0, :1] = 1, cached      # the cache still holds the prompt
            for token in ids[cached:]:
                sampler.token[:1] = token
                sampler._forward(1, 16)()
            fused, out = sampler.fused, torch.empty(1, sampler.fused.width)
            fused.logits(now, fused.buffers(sampler.arena, 1), out)
            logits = out[0, :LIMIT]
        with torch.no_grad():
            expected = model.logits(ids)[-1, :LIMIT]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [1, 16, 64])
def test_prompts_of_one_token_or_a_whole_bucket_and_twice(tiny, length):
    prompt = random_prompts((length,))[0]
    sampler = Sampler(tiny, [], LIMIT)
    twice = sampler.generate([prompt, prompt], [4, 4], 2, 0, 0, Sampling(max_new_tokens=9))
    compare(twice[2], twice[0])
    compare(twice[3], twice[1])
    compare(twice[1], generate_reference(tiny, prompt, 4, 1, 0, 0, Sampling(max_new_tokens=9), [], LIMIT))


# ------------------------------------------------------------------------------------------- how rows finish
EOS2 = 9, 15


@pytest.mark.parametrize("wanted, cap, length, finish", [
    ([9, 8, 15, 0, 0], 5, 1, "stop"), ([7, 8, 15, 0, 0], 5, 3, "stop"),    # either EOS id, kept
    ([7, 7, 7, 9], 4, 4, "stop"), ([7, 7, 7, 7], 4, 4, "length"), ([7, 9], 4, 2, "stop"),
    ([7, 7, 7, 7, 9], 4, 4, "length")])
@pytest.mark.parametrize("check_every", [1, 3, 8])
def test_stop_at_any_eos_even_on_the_last_token(tiny, wanted, cap, length, finish, check_every):
    response, other = scripted([wanted, [1]], tiny, EOS2, check_every=check_every,
                               sampling=Sampling(0, max_new_tokens=cap))
    assert response.tokens == wanted[:length] and response.finish == finish
    assert other.tokens == [1] * cap and other.finish == "length"


def test_pad_equal_to_eos_is_still_an_action(tiny):
    """Nothing is told by a pad id: masks are lengths, and the last EOS counts as a token."""
    prompt_of_pads = scripted([[7, 9]], tiny, [9], prompt=(9, 9), sampling=Sampling(0, max_new_tokens=4))
    assert prompt_of_pads[0].tokens == [7, 9] and len(prompt_of_pads[0].logps) == 2


def test_no_new_tokens_and_no_room(tiny):
    assert Sampler(tiny, [], LIMIT).generate([[1, 2], [3]], [5, 6], 2, 0, 0, Sampling(max_new_tokens=0)) == [
        Response(row, s, [], [], "length") for row in (5, 6) for s in (0, 1)]
    sampler = Sampler(tiny, [], LIMIT, max_len=6)
    full, nearly = sampler.generate([[1] * 6, [1] * 4], [0, 1], 1, 0, 0, Sampling(max_new_tokens=5))
    assert full == Response(0, 0, [], [], "context")
    assert len(nearly.tokens) == 2 and nearly.finish == "context"
    assert sampler.generate([], [], 3, 0, 0, Sampling()) == []          # a rank without prompts


@pytest.mark.parametrize("options, word", [
    ({"temperature": -0.1}, "temperature"), ({"temperature": math.nan}, "temperature"),
    ({"temperature": 1e-7}, "temperature"),
    ({"temperature": math.inf}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"), ({"max_new_tokens": -1}, "max_new_tokens")])
def test_impossible_options_are_refused(options, word):
    with pytest.raises(ValueError, match=f"^{word} "):
        Sampling(**options)


def test_impossible_requests_are_refused(tiny):
    sampler = Sampler(tiny, [], LIMIT)
    for prompt in ([], [1] * 98):
        with pytest.raises(ValueError, match="row 31: a prompt of"):
            sampler.generate([[1], prompt], [30, 31], 1, 0, 0, Sampling())
    with pytest.raises(ValueError, match="2 prompts, 1 rows"):
        sampler.generate([[1], [2]], [0], 1, 0, 0, Sampling())
    with pytest.raises(ValueError, match="must be positive"):
        Sampler(tiny, [], 0)


def test_nan_logits_name_step_and_row(tiny):
    broken = build(**SMALL)
    with torch.no_grad():
        broken.model.embed_tokens.weight[77] = math.nan
        sampler = Sampler(broken, [], 70)               # id 77 is never sampled, only in a prompt
    for sampling in (Sampling(max_new_tokens=40), Sampling(0, max_new_tokens=40)):
        with pytest.raises(ValueError, match="step 12, row 31: the logits are NaN"):
            sampler.generate([[5], [77], [6]], [30, 31, 32], 2, 0, 12, sampling)
        assert sampler.stats["decode_steps"] < 3
    assert len(sampler.generate([[5]], [0], 1, 0, 0, Sampling(max_new_tokens=4))[0].tokens) == 4
    with pytest.raises(ValueError, match="NaN"):        # it fills the cache beyond what comes next
        sampler.generate([[77] * 40], [0], 2, 0, 0, Sampling(max_new_tokens=3))
    with torch.no_grad():
        broken.model.embed_tokens.weight[77] = 0
    sampler.refresh()
    request = [[5], [6, 7]], [0, 1], 1, 0, 0, Sampling(max_new_tokens=19)
    assert sampler.generate(*request) == Sampler(broken, [], 70).generate(*request)


# ---------------------------------------------------------------------------------------------------- choice
def test_uniforms_depend_on_each_part_of_the_key_and_on_nothing_else():
    base = uniforms(3, 4, 5, 6, 40)
    assert base.dtype == np.float64 and base.min() >= 0 and base.max() <= BELOW_ONE
    assert np.array_equal(base[:7], uniforms(3, 4, 5, 6, 7))    # position by position, whatever the cap
    draws = {tuple(uniforms(*key, 40)) for key in itertools.product((3, 4), (4, 3), (5, 6), (6, 5))}
    assert len(draws) == 16
    assert len(set(np.concatenate(list(map(list, draws))))) == 16 * 40     # no stream is another one, shifted
    state = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    uniforms(1, 2, 3, 4, 5)
    assert state == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_noise_key_is_what_the_contract_says(tiny):
    sampler, prompt = Sampler(tiny, [], LIMIT), [4, 8, 15]

    def tokens(seed=0, step=0, row=0, samples=2, cap=12):
        return [r.tokens for r in sampler.generate([prompt], [row], samples, seed, step,
                                                   Sampling(max_new_tokens=cap))]

    base = tokens()
    assert base[0] != base[1] and tokens(samples=5)[:2] == base and [t[:5] for t in base] == tokens(cap=5)
    others = [tokens(seed=1), tokens(step=1), tokens(row=1)]
    assert all(a != b for a, b in itertools.combinations([base, *others], 2))


def test_first_tokens_of_a_group_differ(tiny):
    responses = Sampler(tiny, [], LIMIT).generate([[3, 1]], [0], 30, 0, 0, Sampling(max_new_tokens=1))
    assert len({r.tokens[0] for r in responses}) > 10


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=1), Sampling(0.7, max_new_tokens=1),
                                      Sampling(1.0, 0.7, max_new_tokens=1),
                                      Sampling(1.2, top_k=9, max_new_tokens=1),
                                      Sampling(1.1, 0.9, 20, max_new_tokens=1)], ids=str)
def test_tokens_follow_the_softmax(tiny, sampling):
    from scipy.stats import chisquare
    n, prompt = 4000, [9, 4, 2]
    responses = Sampler(tiny, [], LIMIT, slots=1000).generate([prompt], [0], n, 11, 0, sampling)
    counts = np.bincount([r.tokens[0] for r in responses], minlength=LIMIT)
    with torch.no_grad():
        p = (tiny.logits(prompt)[-1, :LIMIT].double() / sampling.temperature).softmax(-1).numpy()
    order = np.argsort(-p, kind="stable")[:sampling.top_k or None]
    if sampling.top_p < 1:
        order = order[:1 + np.searchsorted(p[order].cumsum(), sampling.top_p * p[order].sum())]
    kept = np.zeros(LIMIT)
    kept[order] = p[order] / p[order].sum()
    assert counts[kept == 0].sum() == 0
    common = kept * n >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(kept[common] * n, kept[~common].sum() * n)
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    assert len(expected) > 5 and chisquare(observed, expected).pvalue > 1e-3


def invert(p, u, chunk, limit):
    out = torch.empty(len(p), 1, dtype=torch.int64)
    inverse_cdf(now, p, u, chunk, limit, out)
    return out


@pytest.mark.parametrize("chunk", [16, 160])
def test_inverse_cdf_is_exact(chunk):
    """Inside the interval of every id, at its start and at its end, against float64 over the whole row; and
    the ends of the row are never an id of probability 0."""
    generator = torch.Generator().manual_seed(0)
    limit = 151
    p = torch.rand(300, 160, generator=generator) ** 6 * (torch.rand(300, 160, generator=generator) < 0.4)
    p[:, limit:] = 0
    p[1, :64] = 0                               # whole chunks without mass
    p[2] = 0
    p[2, 150] = 1e-30                           # one id, and next to nothing on it
    p[3, 32:] = 0
    p[4] *= 1e20
    for row in p[:7]:
        ids, total = row.nonzero()[:, 0], row.double().sum()
        edges = (row.double().cumsum(0) - row.double())[ids] / total
        width = row[ids].double() / total
        for inside in (1e-3, 0.5, 1 - 1e-3):
            u = (edges + inside * width)[:, None]
            picked = invert(row.repeat(len(u), 1), u, chunk, limit)[:, 0]
            wide = width > 1e-3    # sums of chunks are fp32: edges are right to 1e-7 of the total
            assert wide.any() and torch.equal(picked[wide], ids[wide]) and (row[picked] > 0).all()
    for u in (0.0, 5e-324):
        picked = invert(p, torch.full((300, 1), u, dtype=torch.float64), chunk, limit)
        assert picked[:, 0].tolist() == [int(row.nonzero()[0]) for row in p]
    picked = invert(p, torch.full((300, 1), BELOW_ONE, dtype=torch.float64), chunk, limit)
    behind = p * (torch.arange(160) > picked)
    assert (p.gather(1, picked) > 0).all() and (behind.sum(1) <= 1e-6 * p.sum(1)).all()


def pick(logits, sampling, draws):
    """Ids drawn from `logits` [V] as the sampler does it."""
    p = torch.tensor(logits).softmax(-1).expand(draws, -1).contiguous()
    k, top_p = (torch.full((draws, 1), float(x)) for x in (sampling.top_k or p.shape[1], sampling.top_p))
    u = torch.from_numpy(uniforms(0, 0, 0, 0, draws))[:, None]
    return invert(truncate(p, k, top_p), u, 1, p.shape[1])[:, 0].tolist()


def test_top_p_and_top_k_at_their_edges():
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert set(pick(logits.tolist(), Sampling(top_p=1e-8), 50)) == {int(logits.argmax())}
    assert set(pick(logits.tolist(), Sampling(top_p=1e-60), 50)) == {int(logits.argmax())}      # 0 in fp32
    assert set(pick([0.0, 0.0], Sampling(top_p=1.0), 200)) == {0, 1}
    assert set(pick([0.0, 0.0], Sampling(top_p=0.5), 200)) == {0}    # half of the mass is one id: the lower
    assert set(pick([0.0, 1.0, 1.0, 1.0], Sampling(top_k=2), 200)) == {1, 2}    # ties: exactly k
    assert set(pick([0.0, 1.0, 1.0], Sampling(top_k=1), 50)) == {1}
    assert set(pick([0.0] * 5, Sampling(top_k=9), 300)) == set(range(5))
    assert set(pick(np.log([0.4, 0.3, 0.2, 0.1]).tolist(), Sampling(top_p=0.6), 300)) == {0, 1}
    assert set(pick(np.log([0.4, 0.3, 0.2, 0.1]).tolist(), Sampling(top_p=0.75, top_k=2), 300)) == {0, 1}
    assert set(pick(np.log([0.4, 0.3, 0.2, 0.1]).tolist(), Sampling(top_p=0.5, top_k=2), 300)) == {0}


def test_rows_without_a_cut_are_untouched_by_mates_with_one():
    p = torch.rand(2, 77, generator=torch.Generator().manual_seed(0))
    p[:, 70:] = 1e-20           # less than the rounding of the sum before them
    both = truncate(p, torch.tensor([[3.0], [77.0]]), torch.tensor([[0.5], [1.0]]))
    assert torch.equal(both[1], p[1]) and 0 < (both[0] > 0).sum() <= 3


def test_greedy_beside_sampled_with_infinite_logits(tiny):
    """-inf entries, greedy and sampled rows in one batch: the argmax, a possible id, and no NaN."""
    row = [-math.inf] * LIMIT
    row[40], row[41], row[99] = 3.0, 3.5, -2.0
    greedy, sampled, tie = scripted(
        [[0]] * 3, tiny, table=[row, row, [1.0] * LIMIT],
        sampling=[Sampling(t, max_new_tokens=cap) for t, cap in ((0, 6), (1, 6), (0, 2))])
    assert greedy.tokens == [41] * 6 and set(sampled.tokens) <= {40, 41, 99} and tie.tokens == [0, 0]
    z = math.log(math.exp(3) + math.exp(3.5) + math.exp(-2))
    np.testing.assert_allclose(greedy.logps, [3.5 - z] * 6, atol=1e-6)
    np.testing.assert_allclose(sampled.logps, [row[t] - z for t in sampled.tokens], atol=1e-6)


def test_ids_unknown_to_the_tokenizer_are_never_sampled(tiny):
    tall = build(**SMALL)
    with torch.no_grad():       # the largest logit by far, whatever the state
        tall.model.norm.weight.fill_(1.0)
        tall.model.embed_tokens.weight[LIMIT:] = 50.0
        assert int(tall.logits([3, 4])[-1].abs().argmax()) >= LIMIT
    for sampling in (Sampling(0, 1, 0, 30), Sampling(1, 1, 0, 30), Sampling(2.0, 0.9, 120, 30)):
        responses = Sampler(tall, [], LIMIT).generate([[3, 4], [5]], [0, 1], 3, 0, 0, sampling)
        assert max(t for r in responses for t in r.tokens) < LIMIT
    batch = pack([[3, 4], [5]], [i // 3 for i in range(6)], [r.tokens for r in responses])
    with torch.no_grad():
        learner = tall(batch, 2.0, LIMIT)[0]
    ours = torch.tensor([x for r in responses for x in r.logps])
    torch.testing.assert_close(ours, learner, rtol=0, atol=1e-5)


def test_sampled_ids_come_back_as_they_are(tiny):
    """Ids are the record: nothing is decoded and encoded again on the way."""
    sequence = [65, 66, 2, 2, 65]
    response = scripted([sequence], tiny, sampling=Sampling(0, max_new_tokens=5))[0]
    assert response.tokens == sequence and len(response.tokens) == len(response.logps)


# ------------------------------------------------------------------------------------- memory, work, refresh
def test_refresh_takes_over_new_weights_in_the_same_buffers(tiny):
    model = build(**SMALL)
    sampler = Sampler(model, [], LIMIT)
    request = [[3, 4, 5]], [0], 2, 0, 0, Sampling(max_new_tokens=11)
    before, cache = sampler.generate(*request), sampler.cache.data_ptr()
    with torch.no_grad():
        for p, q in zip(model.parameters(), build(5, **SMALL).parameters(), strict=True):
            p.copy_(q)
    sampler.refresh()
    after = sampler.generate(*request)
    assert after == Sampler(model, [], LIMIT).generate(*request) and after[0].tokens != before[0].tokens
    assert sampler.cache.data_ptr() == cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_refreshed(dtype, onednn):
    """One parameter changed at a time: a refreshed sampler equals a new one, an old one does not. The programs
    stay: they read the weights where they were."""
    request = [[3, 4, 5]], [0], 1, 0, 0, Sampling(0, max_new_tokens=3)
    model = build(num_hidden_layers=1, tie_word_embeddings=False)
    sampler = Sampler(model, [], LIMIT, dtype=dtype)
    for name, p in model.named_parameters():
        before, programs = sampler.generate(*request), dict(sampler.programs)
        with torch.no_grad():
            p.mul_(torch.linspace(0.5, 1.5, p.numel()).view(p.shape))
        sampler.refresh()
        after = sampler.generate(*request)
        assert after == Sampler(model, [], LIMIT, dtype=dtype).generate(*request), name
        assert after[0].logps != before[0].logps, name
        assert all(sampler.programs[key] is program for key, program in programs.items())


def test_buffers_are_kept_when_they_suffice_and_grow_when_not(tiny):
    sampler = Sampler(tiny, [], LIMIT, slots=8)
    sizes = []
    for prompts, cap in (([[1, 2]] * 3, 20), ([[1, 2]], 5), ([[1] * 60] * 3, 20), ([[1]] * 8, 9),
                         ([[2]] * 8, 9)):
        responses = sampler.generate(prompts, range(len(prompts)), 1, 0, 0, Sampling(max_new_tokens=cap))
        fresh = Sampler(tiny, [], LIMIT, slots=8).generate(prompts, range(len(prompts)), 1, 0, 0,
                                                           Sampling(max_new_tokens=cap))
        assert [r.tokens for r in responses] == [r.tokens for r in fresh]
        sizes.append((sampler.cache.data_ptr(), sampler.cache.shape[2], sampler.cache.shape[4]))
    assert [size[1:] for size in sizes] == [(4, 64), (4, 64), (4, 128), (8, 128), (8, 128)]
    assert sizes[0][0] == sizes[1][0] and sizes[3][0] == sizes[4][0]


def test_buffers_that_did_not_fit_are_asked_for_again(tiny, monkeypatch):
    sampler, request = Sampler(tiny, [], LIMIT), ([[3, 4]], [0], 1, 0, 0, Sampling(max_new_tokens=5))
    before = sampler.generate(*request)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(sampler.fused, "buffers", lambda *_: (_ for _ in ()).throw(MemoryError()))
        sampler.generate([[3, 4]] * 9, range(9), 1, 0, 0, Sampling(max_new_tokens=90))
    assert sampler.generate(*request) == before


def test_long_responses_need_few_programs():
    """Columns come in steps of an eighth of their number, so that programs and graphs stay few."""
    sampler = Sampler(build(max_position_embeddings=1500, **SMALL), [], LIMIT)
    sampler.generate([[3]], [0], 1, 0, 0, Sampling(max_new_tokens=1100))
    used = sorted(key[2] for key in sampler.programs if key[0] == "_forward")
    assert used[:9] == list(range(16, 145, 16)) and used[-1] == 1152 and len(used) < 36


def test_finished_rows_leave_and_waiting_rows_enter(tiny):
    """Lengths 1, 2, ... 24 on at most 8 slots: few steps, and shrinking batches at the end."""
    caps = [Sampling(max_new_tokens=cap) for cap in random.Random(0).sample(range(1, 25), 24)]
    for every in (1, 4):
        sampler, rows = Sampler(tiny, [], LIMIT, slots=8), []
        sampler.check_every, launch = every, sampler._launch
        sampler._launch = lambda build, n, *key, seen=rows, launch=launch: (
            seen.append(n) if build.__name__ == "_pick" else None, launch(build, n, *key))
        responses = sampler.generate([[5]] * 24, range(24), 1, 0, 0, caps)
        assert [len(r.tokens) for r in responses] == [c.max_new_tokens for c in caps]
        assert max(rows) == 8 and rows[-1] < 8 and rows == sorted(rows, reverse=True)
        work, least = sum(rows), sum(c.max_new_tokens for c in caps)
        assert work < (1.35 if every == 1 else 1.7) * least < 24 * 24


def test_an_end_is_seen_in_its_own_step(tiny):
    """On a CPU, though the tokens are looked at every 16 steps only: no step follows the last EOS, and a slot
    is free for the next request at once."""
    prompts = random_prompts([4] * 12)
    for slots in (12, 1):
        sampler = Sampler(tiny, range(0, LIMIT, 11), LIMIT, slots=slots)
        responses = sampler.generate(prompts, range(12), 1, 0, 0, Sampling(max_new_tokens=90))
        lengths = [len(r.tokens) for r in responses]
        assert sampler.stats["decode_steps"] == (max(lengths) if slots > 1 else sum(lengths))
        assert any(n % 16 for n in lengths) and 16 < max(lengths) < 90


def test_slots_without_a_row_write_nowhere(tiny):
    """Five requests in a bucket of eight, one of them already finished: the other three slots run along."""
    prompts = random_prompts((3, 4, 5, 6, 7))
    picks = [Sampling(max_new_tokens=cap) for cap in (9, 9, 1, 9, 9)]
    sampler = Sampler(tiny, [], LIMIT)
    for response in sampler.generate(prompts, range(5), 1, 0, 0, picks):
        row = response.row
        compare(response, generate_reference(tiny, prompts[row], row, 0, 0, 0, picks[row], [], LIMIT))


def test_prompts_are_prefilled_once_and_in_bounded_batches(tiny, monkeypatch):
    batches, real = [], sample_file.pack
    monkeypatch.setattr(sample_file, "pack", lambda p, *rest: batches.append(p) or real(p, *rest))
    prompts = random_prompts([90] * 50)
    Sampler(tiny, [], LIMIT, slots=7).generate(prompts, range(50), 3, 0, 0, Sampling(max_new_tokens=2))
    assert [len(b) for b in batches] == [11, 11, 11, 11, 6]               # 11 * 90 <= 1,024


def test_memory_of_prefill_is_kept_and_keeps_nothing(tiny):
    """Packs of 305 to 1,025 tokens, smaller and larger in turn, on the same memory: each response is that of a
    sampler of its own, and a second call takes no new memory. That of a prompt above 1,024 is not kept."""
    prompts = random_prompts([90, 400, 3, 400, 400, 400, 300, 5, 1025, 400, 13, 400, 400, 7])
    sampler, pick = Sampler(tiny, [], LIMIT, slots=4, max_len=1100), Sampling(max_new_tokens=3)
    first = sampler.generate(prompts, range(14), 1, 0, 0, pick)
    for response, ids in zip(first, prompts, strict=True):
        alone = Sampler(tiny, [], LIMIT, max_len=1100).generate([ids], [response.row], 1, 0, 0, pick)[0]
        compare(response, alone)
    kept = {name: memory.data_ptr() for name, memory in sampler.packed.items()}
    again = sampler.generate(prompts[:5], range(5), 1, 0, 0, pick)
    for response, expected in zip(again, first[:5], strict=True):
        compare(response, expected)
    assert {name: memory.data_ptr() for name, memory in sampler.packed.items()} == kept and "kv" in kept
    assert len(sampler.packed["y"]) < 1025 * tiny.config.hidden_size


# ---------------------------------------------------------------------------------------------- command line
class Bytes:
    """A tokenizer of bytes; id 0 is special."""

    def decode(self, ids, skip_special_tokens=False):
        ids = [ids] if isinstance(ids, int) else ids
        return bytes(i for i in ids if i or not skip_special_tokens).decode("utf-8", errors="replace")


def test_only_whole_characters_are_printed(monkeypatch):
    """A token may end inside a character: what the printer of `main` gets byte by byte comes out whole."""
    out, text = [], "a\u00e9 \u4e2d\U0001f600 z"
    streamer = TextStreamer(Bytes(), skip_special_tokens=True)
    monkeypatch.setattr(streamer, "on_finalized_text", lambda new, stream_end=False: out.append(new))
    for byte in [*text.encode(), 0]:
        streamer.put(torch.tensor([byte]))
    assert len(list(filter(None, out))) > 3 and not any("\ufffd" in new for new in out)
    streamer.put(torch.tensor([0xe4]))                  # cut off inside a character: shown as what it is
    streamer.end()
    assert "".join(out) == text + "\ufffd"


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["sample.py", *arguments])
    status = 0
    with contextlib.suppress(SystemExit):
        status = 1
        sample_file.main()
        status = 0
    return status, *capsys.readouterr()


def test_command_line(monkeypatch, capsys):
    monkeypatch.chdir(sample_file.__file__.rpartition("/")[0])
    tokenizer, texts = data.load_tokenizer("tiny/model"), []
    for row, question in enumerate(("How many?", "And now?")):
        eos, limit = data.eos_ids("tiny/model", tokenizer), data.vocab_limit(tokenizer)
        sampler = Sampler(load_model("tiny/model"), eos, limit)
        ids = data.prompt_ids(tokenizer, question, False)
        tokens = sampler.generate([ids], [row], 1, 3, 0, Sampling(max_new_tokens=45))[0].tokens
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    options = "--max-new-tokens", "45", "--no-thinking", "--seed", "3"
    status, out, err = run_main(monkeypatch, capsys, "How many?", "And now?", *options)
    assert (status, out) == (0, f"> How many?\n{texts[0]}\n> And now?\n{texts[1]}\n") and "tokens" in err
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", lambda text: written.append(text) or len(text))
        assert run_main(monkeypatch, capsys, "How many?", *options)[0] == 0
    assert "".join(written) == texts[0] + "\n" and sum(map(bool, written)) > 3       # as it comes
    status, out, err = run_main(monkeypatch, capsys, "How many?", "And now?", "--max-new-tokens", "5",
                                "--temperature", "0", "--no-thinking")
    assert status == 0 and out.startswith("> How many?\n") and "\n> And now?\n" in out and "tokens" in err
    for arguments, word in ((("x", "--top-p", "0"), "top_p"), (("x", "--model", "nowhere"), "nowhere"),
                            (("x", "--greedy"), "--greedy")):
        status, out, err = run_main(monkeypatch, capsys, *arguments)
        assert status == 1 and word in err and err.count("\n") == 1 and not out


def test_options_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().top_k = 5
