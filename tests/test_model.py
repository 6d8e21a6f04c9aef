"""The model against transformers and against slower versions of itself: logits, gradients, packing, attention
kernels, precision, token log-probs, and Hugging Face folders that are right, old, sharded or broken."""

import dataclasses
import inspect
import json
import math
import os
import sys
import types
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import model as model_file
from model import ModelConfig, Qwen3, load_model, linear_fp32, local_folder, pack, save_model, token_logp

BASE = {"model_type": "qwen3", "vocab_size": 101, "hidden_size": 35, "intermediate_size": 51,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 73, "tie_word_embeddings": True,
        "hidden_act": "silu"}
CONFIGS = {"tied, 2 query heads per key": {}, "untied, 4 query heads per key": {
    "tie_word_embeddings": False, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 14,
    "hidden_size": 33, "intermediate_size": 46, "vocab_size": 89, "num_hidden_layers": 2, "rope_theta": 1e6}}
PROMPTS = [[5, 17, 3], [2, 9, 4, 33, 8, 41, 7, 19, 11], [6], [12, 13]]           # the last has no response
PROMPT_OF = [1, 0, 0, 2, 1, 0, 2]
RESPONSES = [[1, 2, 3, 4, 5], [7], [8, 60, 61, 62, 63, 64, 65], [70, 71], [33], [], [72, 73, 74, 75]]


def build(seed=0, **changes):
    """A small model with weights large enough, norms included, for every part of it to matter."""
    model = Qwen3(ModelConfig.from_dict({**BASE, **changes}))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = 1 + 0.3 * noise if p.ndim == 1 else noise * 1.5 / p.shape[1] ** 0.5
    return model


def to_transformers(model, folder):
    from transformers import AutoModelForCausalLM
    save_model(model, folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_gradients_close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        gap = (one[name] - other[name]).abs().max() / other[name].abs().max()
        assert gap <= tolerance, (name, gap)


def weighted(logp):
    """A loss with another weight for every token."""
    return (logp * torch.linspace(-1, 1.3, len(logp), dtype=logp.dtype)).sum()


def one_by_one(model, **options):
    """Log-probs and entropies of RESPONSES, every response in a batch of its own."""
    pairs = zip(PROMPT_OF, RESPONSES, strict=True)
    parts = [model(pack([PROMPTS[p]], [0], [r]), **options) for p, r in pairs]
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


# ----------------------------------------------------------------------------------------------- transformers
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_gradients_equal_transformers(tmp_path, changes):
    model = build(**changes)
    theirs = to_transformers(model, tmp_path)
    vocab = model.config.vocab_size
    ids = torch.randint(vocab, (67,), generator=torch.Generator().manual_seed(3)).tolist()
    want = theirs(torch.tensor([ids])).logits[0]
    assert want.std() > 1                                       # otherwise closeness says little
    torch.testing.assert_close(model.logits(ids), want, atol=1e-5, rtol=1e-5)
    responses = [[t % vocab for t in r] for r in RESPONSES]
    expected = []
    for p, r in zip(PROMPT_OF, responses, strict=True):
        logits = theirs(torch.tensor([PROMPTS[p] + r])).logits[0].float() / 0.7
        expected += logits.log_softmax(-1)[range(len(PROMPTS[p]) - 1, len(PROMPTS[p] + r) - 1), r]
    expected = torch.stack(expected)
    logp, _ = model(pack(PROMPTS, PROMPT_OF, responses), temperature=0.7)
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=1e-5)
    assert_gradients_close(gradients(model, weighted(logp)), gradients(theirs, weighted(expected)), 1e-5)


def test_geometry_of_the_0_6b():
    """Head_dim is 128 and not 1024 / 16."""
    with torch.device("meta"):
        model = Qwen3(ModelConfig.from_dict({
            **BASE, "vocab_size": 151936, "hidden_size": 1024, "head_dim": 128, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}))
    layer = model.model.layers[0].self_attn
    shapes = [tuple(p.weight.shape) for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)]
    assert shapes == [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048)]
    assert sum(p.numel() for p in model.parameters()) == 596_049_920


def test_the_scale_of_attention_comes_from_head_dim():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 6, generator=generator) for heads in (4, 2, 2))
    out = model_file.attention(q, k, v, pack([[0] * 5], [], []))
    scores = torch.einsum("qgmd,kgd->gmqk", q.view(5, 2, 2, 6), k) / math.sqrt(6)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    want = torch.einsum("gmqk,kgd->qgmd", scores.softmax(-1), v).reshape(5, 4, 6)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- packing
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_packed_equals_one_by_one(changes):
    """Prompts of 1, 3, 9 tokens, shared, interleaved, unused; responses of 0, 1 and more tokens."""
    model = build(**changes).double()
    responses = [[t % 89 for t in r] for r in RESPONSES]
    batch = pack(PROMPTS, PROMPT_OF, responses)
    assert len(batch.tokens) == sum(map(len, PROMPTS)) + sum(len(r) - 1 for r in responses if r)  # unpadded
    options = {"temperature": 1.3, "vocab_limit": 80}
    logp, entropy = model(batch, **options)
    assert logp.dtype == torch.float64 and logp.shape == (sum(map(len, responses)),)
    want_logp, want_entropy = one_by_one(model, **options)
    torch.testing.assert_close(logp, want_logp, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-12, rtol=1e-12)
    assert_gradients_close(gradients(model, weighted(logp)), gradients(model, weighted(want_logp)), 1e-12)


@pytest.mark.parametrize("prompt, response", [(6, 2), (4, 4), (1, 2), (1, 1), (9, 1)])
def test_continuation_equals_full_forward(prompt, response):
    """One query behind 6 keys, 3 queries behind 4 keys: the mask is aligned at the end, not at 0."""
    model = build()
    ids = [(7 * i + 3) % 101 for i in range(prompt + response)]
    logp, entropy = model(pack([ids[:prompt]], [0], [ids[prompt:]]))
    full = model.logits(ids).log_softmax(-1)[prompt - 1:-1]
    torch.testing.assert_close(logp, full[range(response), ids[prompt:]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), atol=1e-5, rtol=1e-5)


def chain_model(table):
    """Next-token logits are table[:, current token], whatever came before."""
    vocab = len(table)
    model = Qwen3(ModelConfig.from_dict({**BASE, "vocab_size": vocab, "hidden_size": vocab,
                                         "tie_word_embeddings": False}))
    for p in model.parameters():
        p.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(vocab)
    model.model.norm.weight.data.fill_(1 / vocab ** 0.5)     # a one-hot row's norm is sqrt(V) times it
    model.lm_head.weight.data = table
    return model


def test_no_shift_by_one():
    """Prompt [1,2], response [3,4,EOS]: three log-probs, of 3 after 2, of 4 after 3, of EOS after 4."""
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(1)) * 3
    eos = 6
    logp, _ = chain_model(table)(pack([[1, 2]], [0], [[3, 4, eos]]))
    by_state = table.T.log_softmax(-1)
    torch.testing.assert_close(logp, torch.stack([by_state[2, 3], by_state[3, 4], by_state[4, eos]]),
                               atol=1e-4, rtol=1e-4)


def test_nothing_to_learn_is_fine():
    """A rank without responses still runs forward and backward, and contributes zeros."""
    for changes in CONFIGS.values():
        model = build(**changes)
        logp, entropy = model(pack([[4, 5]], [0], [[]]))
        assert logp.shape == entropy.shape == (0,)
        assert all((g == 0).all() for g in gradients(model, logp.sum()).values())
    with pytest.raises(ValueError, match="without tokens"):
        pack([[1], []], [0], [[1]])
    with pytest.raises(ValueError):
        pack([[1]], [0, 0], [[1]])


# -------------------------------------------------------------------------------------------------- attention
def plain_varlen(q, k, v, cu_q, cu_k, max_q, max_k):
    """Variable-length attention sequence by sequence, causal and aligned at the end (as flash-attn is)."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    assert max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
    assert cu_q[-1] == len(q) and cu_k[-1] == len(k) == len(v)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = []
    for s in range(len(cu_q) - 1):
        qs, ks, vs = q[cu_q[s]:cu_q[s + 1]], k[cu_k[s]:cu_k[s + 1]], v[cu_k[s]:cu_k[s + 1]]
        scores = torch.einsum("qhd,khd->hqk", qs, ks) / q.shape[-1] ** 0.5
        late = torch.arange(len(ks)) > torch.arange(len(qs))[:, None] + len(ks) - len(qs)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(late, -torch.inf).softmax(-1), vs))
    return torch.cat(out)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_varlen_kernel_equals_padded_path(monkeypatch, changes):
    model = build(**changes).double()
    batch = pack(PROMPTS, PROMPT_OF, [[t % 89 for t in r] for r in RESPONSES])
    padded, _ = model(batch)
    want = gradients(model, weighted(padded))
    monkeypatch.setattr(model_file, "varlen_kernel", lambda *_: ("plain", plain_varlen))
    logp, _ = model(batch)
    assert set(batch.layout) == {"padded", "varlen"} and not batch.to("cpu").layout
    torch.testing.assert_close(logp, padded, atol=1e-12, rtol=1e-12)
    assert_gradients_close(gradients(model, weighted(logp)), want, 1e-12)


def test_long_prompts_are_attended_in_blocks():
    """As the padded path does it, and both as softmax(q k^T / sqrt(D)) v in fp64."""
    generator, lengths = torch.Generator().manual_seed(0), [211, 1, 97]
    batch = pack([[7] * n for n in lengths], [], [])
    q, k, v = (torch.randn(sum(lengths), heads, 62, generator=generator, requires_grad=True) for heads in (6, 3, 3))

    def attend(select):
        packed = dataclasses.replace(batch, select=select, layout={})
        out = model_file.attention(q, k, v, packed)
        return out, torch.autograd.grad(out.square().sum(), (q, k, v)), "padded" in packed.layout
    (blocks, grads, padded), (other, others, was_padded) = attend(batch.select), attend(torch.zeros(1))
    assert was_padded and not padded
    torch.testing.assert_close(grads, others, rtol=1e-4, atol=1e-4)
    for a, b, c, one, two in zip(*(x.double().split(lengths) for x in (q, k, v, blocks, other)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b.repeat_interleave(2, 1)) / 62 ** 0.5
        p = scores.masked_fill(torch.ones(len(a), len(a)).triu(1).bool(), -torch.inf).softmax(-1)
        exact = torch.einsum("hqk,khd->qhd", p, c.repeat_interleave(2, 1))
        torch.testing.assert_close(one, exact, rtol=0, atol=3e-6)
        torch.testing.assert_close(two, exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("limit", [1, 40, 200])
def test_splitting_the_padded_path_changes_nothing(limit):
    model = build().double()
    whole, parts = (pack(PROMPTS, PROMPT_OF, RESPONSES) for _ in range(2))
    parts.layout["padded"] = list(model_file._padded_layout(parts, "cpu", limit))
    want, _ = model(whole)
    assert len(whole.layout["padded"]) == 2 < len(parts.layout["padded"])
    torch.testing.assert_close(model(parts)[0], want, atol=1e-12, rtol=1e-12)


def test_choice_of_the_kernel(monkeypatch):
    """flash-attn when importable, else PyTorch's; each gets what it asks for. CPU or fp32: neither."""
    choose = model_file.varlen_kernel.__wrapped__
    assert choose("cpu", torch.bfloat16) is None and choose("cuda", torch.float32) is None
    monkeypatch.setitem(sys.modules, "flash_attn", None)                # importing it fails
    from torch.nn.attention import varlen
    signature = inspect.signature(varlen.varlen_attn)

    def fake_torch(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        assert bound["window_size"] == (-1, 0) and bound["query"].shape == bound["key"].shape[:0] + (8, 6, 4)
        assert bound["key"].shape[1] == 6                             # PyTorch's wants equal numbers of heads
        return plain_varlen(*args)
    monkeypatch.setattr(varlen, "varlen_attn", fake_torch)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, 4, generator=generator) for n, heads in ((8, 6), (11, 2), (11, 2)))
    lengths = torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([0, 5, 11], dtype=torch.int32), 5, 6
    want = plain_varlen(q, k, v, *lengths)
    name, kernel = choose("cuda:1", torch.bfloat16)
    assert name == "torch varlen"
    torch.testing.assert_close(kernel(q, k, v, *lengths), want)

    def fake_flash(*args, causal):
        assert causal and args[1].shape[1] == 2                         # flash-attn does grouped heads itself
        return plain_varlen(*args)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=fake_flash))
    name, kernel = choose(torch.device("cuda"), torch.float16)
    assert name == "flash-attn"
    torch.testing.assert_close(kernel(q, k, v, *lengths), want)


def test_activation_checkpointing_changes_no_gradient():
    model = build()
    batch = pack(PROMPTS, PROMPT_OF, RESPONSES)
    want = gradients(model, weighted(model(batch)[0]))
    model.activation_checkpointing = True
    calls = []
    handle = model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    got = gradients(model, weighted(model(batch)[0]))
    assert len(calls) == 2                                              # it really ran again in the backward
    assert all(torch.equal(got[name], want[name]) for name in want)
    handle.remove()


# -------------------------------------------------------------------------------------------------- precision
def test_bf16_autocast_stays_near_fp32():
    """Stated bound for fp32 weights under bf16 autocast: log-probs (here around -6) within 0.12, 0.03 on
    average, entropies within 0.04, gradients at a cosine above 0.998. No warning: norms stay fused."""
    model = build(hidden_size=131, head_dim=32)
    batch = pack(PROMPTS, PROMPT_OF, RESPONSES)
    want, want_entropy = model(batch)
    want_gradients = gradients(model, weighted(want))
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            logp, entropy = model(batch)
            assert model.hidden(batch).dtype == torch.bfloat16
        assert logp.dtype == entropy.dtype == torch.float32
        gap = (logp - want).abs()
        assert 0 < gap.max() < 0.12 and gap.mean() < 0.03, (gap.max(), gap.mean())
        assert (entropy - want_entropy).abs().max() < 0.04
        for name, g in gradients(model, weighted(logp)).items():
            assert g.dtype == torch.float32
            assert torch.cosine_similarity(g.flatten(), want_gradients[name].flatten(), 0) > 0.998, name


@pytest.mark.parametrize("x, w", [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
                                  (torch.float32, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("autocast", [False, True])
def test_norms_compute_in_fp32_and_round_once(x, w, autocast):
    norm = model_file.RMSNorm(1023, eps=1e-6).to(w)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data.uniform_(0.3, 3, generator=generator)
    values = (torch.randn(7, 1023, generator=generator) * 30).to(x)
    exact = values.double() * torch.rsqrt(values.double().square().mean(-1, keepdim=True) + 1e-6)
    exact = exact * norm.weight.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = norm(values)
    assert out.dtype == x
    unit = {torch.bfloat16: 2 ** -8, torch.float32: 2 ** -20, torch.float64: 2 ** -48}[x]
    assert ((out.double() - exact) / exact).abs().max() <= unit * 1.001


def test_rotation_tables_in_every_precision():
    """In bf16, positions 256 and 257 would be one."""
    positions = torch.tensor([0, 1, 256, 257, 1023, 40959])
    model = build(max_position_embeddings=40960, head_dim=16).bfloat16()
    cos, sin = (table[positions][:, None] for table in model_file.rope_tables(model.config, 40960))
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (6, 1, 8)
    freq = 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = positions.double()[:, None] * freq
    for table, want in ((cos, angle.cos()), (sin, angle.sin())):
        assert (table[:, 0].double() - want).abs().max() < 1e-7
        assert (table[2] != table[3]).any()
    x = torch.randn(6, 3, 16, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    turned = model_file.apply_rope(x, cos, sin)
    a, b = x.double().chunk(2, -1)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    exact = torch.cat([a * c - b * s, b * c + a * s], -1)
    assert turned.dtype == torch.bfloat16                       # rounded once, at the end
    assert ((turned.double() - exact).abs() <= exact.abs() * 2 ** -8 + 1e-6).all()
    assert model_file.rope_tables(model.config, 5)[0].shape == (5, 8)


@pytest.mark.parametrize("autocast", [False, True])
def test_products_of_16_bit_operands_are_fp32(autocast):
    """Logits of size 100 rounded to bf16 would be off by up to 0.25."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).bfloat16() * 3 for shape in ((7, 131), (11, 131)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, wide = linear_fp32(a, b), linear_fp32(a.float(), b.float())
    assert out.dtype == wide.dtype == torch.float32
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, atol=1e-4, rtol=1e-5)
    assert torch.equal(out, wide)
    assert linear_fp32(a.double(), b.double()).dtype == torch.float64


# -------------------------------------------------------------------------------------------- token log-probs
M, E, V, LIMIT = 7, 13, 1009, 911


def heads(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    h = (torch.randn(M, E, generator=generator) * scale).to(dtype).requires_grad_()
    w = torch.randn(V, E, generator=generator).to(dtype).requires_grad_()
    return h, w, torch.tensor([0, 255, 256, 910, 511, 512, 300])     # first, last, both sides of a border


def plain_logp(h, w, targets, temperature, limit):
    logits = (h @ w.T / temperature)[:, :limit]
    logp = logits.log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("max_elements", [1, 300 * M, 2 ** 24])
@pytest.mark.parametrize("temperature, limit", [(1.0, None), (0.7, LIMIT), (2.5, 5000)])
def test_token_logp_equals_log_softmax(max_elements, temperature, limit):
    h, w, targets = heads()
    logp, entropy = token_logp(h, w, targets, temperature, limit, max_elements)
    want, want_entropy = plain_logp(h, w, targets, temperature, limit)
    torch.testing.assert_close(logp, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-12, rtol=1e-12)
    assert not entropy.requires_grad
    got, expected = (torch.autograd.grad(weighted(x), (h, w)) for x in (logp, want))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    assert limit != LIMIT or ((got[1][:LIMIT] != 0).all() and (got[1][LIMIT:] == 0).all())


def test_token_logp_gradcheck():
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 2, generator=generator, dtype=torch.float64).requires_grad_() for n in (3, 271))
    targets = torch.tensor([0, 269, 256])

    def check():
        return torch.autograd.gradcheck(lambda h, w: token_logp(h, w, targets, 0.8, 270, 1)[0], (h, w),
                                        fast_mode=True)
    assert check()
    for frozen in (h, w):                                       # only one side needs a gradient
        frozen.requires_grad_(False)
        assert check()
        frozen.requires_grad_(True)
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    grad, = torch.autograd.grad(token_logp(h, w, targets)[0], h, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()                                   # refused, not silently wrong


def test_ids_beyond_the_limit_are_outside(monkeypatch):
    """A padding id with the largest logit changes nothing; as a target it is impossible, not likely."""
    h, w, targets = heads(torch.float32)
    want = token_logp(h, w[:LIMIT], targets)
    w.data[LIMIT + 3] = 50 * h.detach()[0]
    for logp, reference in zip(token_logp(h, w, targets, 1.0, LIMIT), want, strict=True):
        assert torch.equal(logp, reference)
    assert token_logp(h, w, torch.full((M,), LIMIT), 1.0, LIMIT)[0].tolist() == [-math.inf] * M
    model = build()
    ids = [1, 2, 3]
    got, _ = model(pack([ids], [0], [[4]]), temperature=0.5, vocab_limit=97)
    want = (model.logits(ids)[-1, :97] / 0.5).log_softmax(-1)[4]
    torch.testing.assert_close(got[0], want)


def test_token_logp_is_stable_and_precise_in_bf16():
    h, w, targets = heads(torch.float32, scale=40)              # logits up to several hundred
    h16 = h.detach().bfloat16().requires_grad_()
    logp, entropy = token_logp(h16, w, targets, 1.0, LIMIT, 1)
    want, want_entropy = plain_logp(h16.double(), w.bfloat16().double(), targets, 1.0, LIMIT)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-4, rtol=1e-4)
    dh, dw = torch.autograd.grad(logp.sum(), (h16, w))
    assert dh.dtype == torch.bfloat16 and dw.dtype == torch.float32 and dw.isfinite().all()
    exact = torch.autograd.grad(want.sum(), h16, retain_graph=True)[0]
    torch.testing.assert_close(dh, exact, atol=0.02, rtol=0.02)


def test_autocast_leaves_log_probs_and_entropy_in_fp32():
    """The loop calls it inside autocast, which rounds the operands of every product of matrices to bf16."""
    h, w, targets = heads(torch.float32)
    h, w = h.detach().bfloat16(), w.detach()
    with torch.autocast("cpu", torch.bfloat16):
        logp, entropy = token_logp(h, w, targets, 1.0, LIMIT, 300 * M)
    want, want_entropy = plain_logp(h.double(), w.bfloat16().double(), targets, 1.0, LIMIT)
    torch.testing.assert_close(logp.double(), want, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("max_elements", [1, 2 ** 22])
def test_gradient_of_large_logits_keeps_its_digits(max_elements):
    """A common offset of 1e4 leaves every difference of logits as it is; the exact gradient along it is 0."""
    h, w, targets = heads(torch.float32)
    with torch.no_grad():
        h[:, 0], w[:, 0] = 1, 1e4
    dh, = torch.autograd.grad(token_logp(h, w, targets, 1.0, LIMIT, max_elements)[0].sum(), h)
    exact, = torch.autograd.grad(plain_logp(h.double(), w.double(), targets, 1.0, LIMIT)[0].sum(), h)
    torch.testing.assert_close(dh[:, 1:], exact[:, 1:], atol=5e-3, rtol=0)
    assert (dh - exact)[:, 0].abs().max() < 0.05            # of 1e4; 4.5 with one rounded log-sum-exp


class LargestOutput(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_full_logits_never_exist():
    """1,024 response tokens of the real vocabulary, forward and backward (only shapes are computed)."""
    from torch._subclasses import FakeTensorMode
    m, e, v = 1024, 16, 151936
    for dtype in (torch.bfloat16, torch.float32):
        with FakeTensorMode(), LargestOutput() as seen:
            h = torch.empty(m, e, dtype=dtype, requires_grad=True)
            weight = torch.empty(v, e, requires_grad=True)
            before = seen.numel
            logp, _ = token_logp(h, weight, torch.zeros(m, dtype=torch.int64), 1.0, 151669)
            logp.sum().backward()
            assert weight.grad.shape == (v, e) and before == v * e
        assert v * e < seen.numel <= 2 ** 24 < m * v / 9, seen.numel


# ---------------------------------------------------------------------------------------------------- folders
@pytest.fixture
def folder(tmp_path):
    save_model(build(), tmp_path / "m")
    return tmp_path / "m"


def edit_config(folder, **changes):
    """None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder, **changes):
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **{k.replace("__", "."): v for k, v in changes.items()}}
    tensors = {k: v.clone() for k, v in tensors.items() if v is not None}
    save_file(tensors, path, metadata={"format": "pt"})


def same_weights(one, other):
    one, other = (dict(m.named_parameters()) for m in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_folders_of_transformers_load(tmp_path, changes, shard):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(**{**BASE, **changes}))
    theirs.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (len(list(tmp_path.glob("model-*.safetensors"))) > 3) == bool(shard)
    ours = load_model(tmp_path)
    assert same_weights(ours, theirs) and all(p.requires_grad for p in ours.parameters())
    want = theirs(torch.tensor([[3, 1, 4]])).logits[0]
    torch.testing.assert_close(ours.logits([3, 1, 4]), want, atol=1e-5, rtol=1e-5)
    save_model(ours, tmp_path / "again")
    assert same_weights(Qwen3ForCausalLM.from_pretrained(tmp_path / "again"), theirs)
    assert same_weights(load_model(tmp_path / "again"), ours)
    assert load_model(tmp_path, dtype=torch.bfloat16).head_weight.dtype == torch.bfloat16


def test_save_model_writes_what_readers_need(tmp_path):
    """A config made in code, a bf16 model, a stale index in the way, the source folder itself as target."""
    from transformers import AutoConfig
    fields = {k: v for k, v in BASE.items() if k not in ("model_type", "hidden_act")}
    model = Qwen3(ModelConfig(**fields)).init_weights(1).bfloat16()
    tmp_path.joinpath("model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    tmp_path.joinpath("tokenizer.json").write_text("{}")
    save_model(model, tmp_path, source=tmp_path)
    again = load_model(tmp_path, dtype=torch.bfloat16)
    assert same_weights(again, model)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16" and written["architectures"] == ["Qwen3ForCausalLM"]
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1e4
    other = Qwen3(ModelConfig(**fields)).init_weights(1).bfloat16()
    assert same_weights(other, model)
    assert not same_weights(Qwen3(ModelConfig(**fields)).init_weights(2), other)
    std = model.init_weights(3).model.embed_tokens.weight.float().std()
    assert abs(std - 0.02) < 0.002 and (model.model.norm.weight == 1).all()


def test_weights_are_copies_of_the_file(folder):
    """A folder that is overwritten while a run uses the model must not reach into the run."""
    model, path = load_model(folder), folder / "model.safetensors"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(b"\xff" * size)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_redundant_head_of_a_tied_model(folder):
    """The same again is fine, another one is an error and not dropped."""
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, lm_head__weight=embed)
    model = load_model(folder)
    assert "lm_head.weight" not in dict(model.named_parameters()) and torch.equal(model.head_weight, embed)
    for head in (embed + 1e-6, embed[:-1]):
        edit_tensors(folder, lm_head__weight=head)
        with pytest.raises(ValueError, match="model.safetensors.*lm_head.weight"):
            load_model(folder)


def test_the_tie_flag_decides(folder):
    """An untied head of minus the embeddings changes the sign; a missing flag means untied."""
    tied = load_model(folder).logits([3, 1, 4])
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, lm_head__weight=-embed)
    for flag in (False, None):
        edit_config(folder, tie_word_embeddings=flag)
        torch.testing.assert_close(load_model(folder).logits([3, 1, 4]), -tied)
    edit_tensors(folder, lm_head__weight=None)
    with pytest.raises(ValueError, match="lm_head.weight is missing"):
        load_model(folder)


@pytest.mark.parametrize("top, nested, want", [
    (1000000, None, 1e6), (None, {"rope_theta": 1000000, "rope_type": "default"}, 1e6),
    (1000000, {"rope_theta": 1000000.0}, 1e6), (None, None, "rope_theta is missing"),
    (None, {"rope_type": "default"}, "rope_theta is missing"),
    (10000, {"rope_theta": 1000000}, "contradicting"), (1000000, {"rope_type": "yarn"}, "yarn"),
    (None, {"rope_theta": 1e6, "type": "linear"}, "linear"), ("1e6", None, "rope_theta = '1e6'"),
    (-1.0, None, "rope_theta")])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_theta_wherever_it_is(folder, top, nested, want, key):
    """On top, nested, or an error that says so; never a silent 10000."""
    edit_config(folder, rope_theta=top, **{key: nested})
    if isinstance(want, float):
        assert load_model(folder).config.rope_theta == want
        return
    with pytest.raises(ValueError, match=want) as caught:
        load_model(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("changes, want", [
    ({"model_type": "llama"}, "model_type 'llama'"), ({"model_type": None}, "model_type None"),
    ({"attention_bias": True}, "attention_bias"), ({"use_sliding_window": True}, "use_sliding_window"),
    ({"hidden_act": "gelu"}, "gelu"), ({"head_dim": None}, "head_dim is missing"),
    ({"hidden_size": "35"}, "hidden_size = '35'"), ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
    ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
    ({"head_dim": 9}, "head_dim is odd"), ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"vocab_size": 101.5}, "vocab_size"),
    ({"vocab_size": 102}, "model.embed_tokens.weight has shape \\(101, 35\\).*\\(102, 35\\)"),
    ({"num_hidden_layers": 2}, "model.layers.2.* is not part of the model \\(11 in all\\)"),
    ({"num_hidden_layers": 4}, "model.layers.3.* is missing \\(11 in all\\)")])
def test_what_is_not_done_here_is_refused(folder, changes, want):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=want) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_named(folder):
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_norm.weight"
    bias = "model.layers.1.self_attn.k_proj.bias"
    for tensors, want in (({k: v for k, v in whole.items() if k != name}, f"tensor {name} is missing"),
                          ({**whole, bias: torch.zeros(3)}, f"tensor {bias} is not part of the model"),
                          ({**whole, name: torch.zeros(11)}, f"tensor {name} has shape \\(11,\\)")):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=want):
            load_model(folder)


def test_broken_files_are_named(folder, tmp_path):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for broken in (data[:-1], data[:100], data[:7], b"", b"\xff" * len(data)):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="model.safetensors: not a complete safetensors file"):
            load_model(folder)
    path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(FileNotFoundError, match="model.safetensors.*safetensors only"):
        load_model(folder)
    path.write_bytes(data)
    for text in ("{", "[]", "3", '"x"', "\xff"):
        (folder / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="config.json"):
            load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_model(folder)


def test_broken_shards_are_named(folder):
    """Every shard that the index names is looked for before any is read, and only in the folder."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half = sorted(whole)[::2]
    save_file({n: whole[n] for n in half}, folder / "a.safetensors")
    save_file({n: whole[n] for n in whole if n not in half}, folder / "b.safetensors")
    index = folder / "model.safetensors.index.json"
    good = {n: "a.safetensors" if n in half else "b.safetensors" for n in whole}
    index.write_text(json.dumps({"weight_map": good}))
    assert same_weights(load_model(folder), build())
    index.write_text(json.dumps({"weight_map": {**good, half[0]: "b.safetensors"}}))
    with pytest.raises(ValueError, match=f"b.safetensors.*{half[0]}"):
        load_model(folder)
    os.symlink(folder / "a.safetensors", folder.parent / "c.safetensors")
    for shard in ("../c.safetensors", str(folder.parent / "c.safetensors"), "no.safetensors", "", ".."):
        index.write_text(json.dumps({"weight_map": {**good, half[0]: shard}}))
        with pytest.raises(FileNotFoundError, match="named by model.safetensors.index.json but not there"):
            load_model(folder)
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="index.json"):
            load_model(folder)
    index.write_text(json.dumps({"weight_map": good}))
    os.truncate(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 1)
    with pytest.raises(ValueError, match="b.safetensors: not a complete"):
        load_model(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="b.safetensors"):
        load_model(folder)


def test_names_of_folders(monkeypatch, tmp_path):
    import huggingface_hub
    monkeypatch.chdir(tmp_path)         # "../x" must not depend on what lies beside the checkout
    asked = []

    def offline(name, **_options):
        asked.append(name)
        raise ConnectionError("no network\nand more lines")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert local_folder(str(tmp_path)) == tmp_path
    for name in ("nonsense", "./no/model", "a/b/c", "/no/folder", "~/model", "../x", "x/", tmp_path / "x"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            local_folder(name)
    assert not asked                                            # a path is never sent to the hub
    with pytest.raises(OSError, match="Qwen/Qwen3-0.6B: no such path, and not from the hub"):
        local_folder("Qwen/Qwen3-0.6B")
    assert asked == ["Qwen/Qwen3-0.6B"]
