"""Qwen3 by hand: the packed forward pass, chunked token log-probs, Hugging Face folders in and out.

    model = load_model("Qwen/Qwen3-0.6B")      # or a folder; parameter names equal the Hugging Face names
    batch = pack([prompt], [0, 0], [resp_a, resp_b])
    logp, entropy = model(batch, temperature=1.0, vocab_limit=151669)     # one value per response token
    save_model(model, "out", source="Qwen/Qwen3-0.6B")

Nothing is padded or computed twice: a prompt shared by K responses is run once and its keys and values serve
all K (`pack`). Letters in shape comments: N packed tokens, M response tokens, H query heads, G key/value
heads, D head size, E hidden size, V vocabulary. No sampling here (sample.py).
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


# ---------------------------------------------------------------------------------------------- configuration
@dataclasses.dataclass
class ModelConfig:
    """The fields of a Qwen3 config.json that the computation depends on; `raw` keeps the whole file."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int                    # explicit: 128 for the 0.6B, not hidden_size / num_attention_heads = 64
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    initializer_range: float = 0.02
    raw: dict = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, raw, where="config.json"):
        """Raises ValueError naming the key that is missing, malformed or asks for what is not done here."""
        ropes = [raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        rope_types = [rope.get("rope_type", rope.get("type", "default")) for rope in ropes]
        for key, value, only in (("model_type", raw.get("model_type"), "qwen3"),
                                 ("attention_bias", raw.get("attention_bias", False), False),
                                 ("use_sliding_window", raw.get("use_sliding_window", False), False),
                                 ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
                                 *(("rope type", rope_type, "default") for rope_type in rope_types)):
            if value != only:
                raise ValueError(f"{where}: {key} {value!r} is not supported, only {only!r} is")
        thetas = {rope.get("rope_theta") for rope in (raw, *ropes)} - {None}       # on top in older folders
        if len(thetas) > 1:
            raise ValueError(f"{where}: contradicting values of rope_theta: {thetas}")
        found = {"tie_word_embeddings": False, "initializer_range": 0.02, **raw,
                 "rope_theta": next(iter(thetas), None)}
        for name, kind in _KINDS.items():
            value = found.get(name)
            if not (type(value) is bool if kind is bool else type(value) in (int, kind) and value > 0):
                problem = "is missing" if value is None else f"= {value!r} is not a usable {kind.__name__}"
                raise ValueError(f"{where}: {name} {problem}")
        if found["num_attention_heads"] % found["num_key_value_heads"] or found["head_dim"] % 2:
            raise ValueError(f"{where}: num_attention_heads {found['num_attention_heads']} is no multiple of "
                             f"num_key_value_heads {found['num_key_value_heads']}, or head_dim is odd")
        return cls(**{name: found[name] for name in _KINDS}, raw=dict(raw))

    @classmethod
    def from_folder(cls, folder):
        path = Path(folder) / "config.json"
        return cls.from_dict(_read_json(path), where=str(path))


_KINDS = {field.name: field.type for field in dataclasses.fields(ModelConfig) if field.name != "raw"}


def _read_json(path):
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a JSON object ({error})") from None


# --------------------------------------------------------------------------------------------- packed batches
@dataclasses.dataclass
class Packed:
    """S segments without padding: the distinct prompts, then the responses (without their last tokens, which
    predict nothing). A segment's queries are its own tokens; its keys are its prompt, then itself."""
    tokens: torch.Tensor        # [N] ids
    positions: torch.Tensor     # [N] position in its own sequence
    select: torch.Tensor        # [M] index into N of the state that predicts target m
    targets: torch.Tensor       # [M] every response token, response after response
    q_lens: list                # [S] queries of each segment; sums to N
    k_lens: list                # [S] keys of each segment, >= its queries
    k_starts: list              # [S] where the segment's prompt begins in N (itself for a prompt)
    layout: dict = dataclasses.field(default_factory=dict)      # per attention kernel, built on first use

    def to(self, device):
        moved = (x.to(device, non_blocking=True)
                 for x in (self.tokens, self.positions, self.select, self.targets))
        return Packed(*moved, self.q_lens, self.k_lens, self.k_starts)


def pack(prompts, prompt_of, responses):
    """prompts: id lists; response i (an id list, may be empty) continues prompts[prompt_of[i]]. -> Packed."""
    tokens, positions, q_lens, k_lens, k_starts, select, targets = ([] for _ in range(7))

    def add_segment(ids, shared, start):       # `shared` tokens of the prompt that begins at `start`, and ids
        tokens.extend(ids)
        positions.extend(range(shared, shared + len(ids)))
        q_lens.append(len(ids))
        k_lens.append(shared + len(ids))
        k_starts.append(start)

    for ids in prompts:
        if not ids:
            raise ValueError("a prompt without tokens cannot be continued")
        add_segment(ids, 0, len(tokens))
    for p, ids in zip(prompt_of, responses, strict=True):
        shared, start = len(prompts[p]), k_starts[p]
        if ids:
            select += [start + shared - 1, *range(len(tokens), len(tokens) + len(ids) - 1)]
            targets += ids
        if len(ids) > 1:
            add_segment(ids[:-1], shared, start)
    as_ids = [torch.tensor(x, dtype=torch.int64) for x in (tokens, positions, select, targets)]
    return Packed(*as_ids, q_lens=q_lens, k_lens=k_lens, k_starts=k_starts)


# -------------------------------------------------------------------------------------------------- attention
@functools.cache         # a failing import of flash-attn searches the whole path: once, not once per layer
def varlen_kernel(device, dtype):
    """The fastest variable-length attention at hand as (name, function), or None: flash-attn when importable,
    else PyTorch's own. Both want CUDA and 16-bit floats; everything else takes the padded path."""
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from flash_attn import flash_attn_varlen_func
        return "flash-attn", lambda *inputs: flash_attn_varlen_func(*inputs, causal=True)
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn
    return "torch varlen", lambda q, k, v, *lengths: varlen_attn(
        q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)), *lengths, window_size=(-1, 0))


def _key_index(batch, s, own_start):
    """Indices into N of segment s's keys: its prompt, then its own tokens."""
    start, shared = batch.k_starts[s], batch.k_lens[s] - batch.q_lens[s]
    return torch.cat([start + torch.arange(shared), own_start + torch.arange(batch.q_lens[s])])


def _varlen_layout(batch, device):
    starts = [0, *accumulate(batch.q_lens)]
    keys = torch.cat([_key_index(batch, s, starts[s]) for s in range(len(batch.q_lens))])
    cu_q, cu_k = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (batch.q_lens, batch.k_lens))
    return keys.to(device), cu_q.to(device), cu_k.to(device), max(batch.q_lens), max(batch.k_lens)


def _padded_layout(batch, device, limit=2 ** 24):
    """Groups of segments in a row for padded attention: (q_index [s,Q], k_index [s,K], mask or None, keep).
    A group is all prompts (plain causal, no mask) or all responses, with at most `limit` scores per head."""
    layout, first, starts = [], 0, [0, *accumulate(batch.q_lens)]
    shared = [k - q for k, q in zip(batch.k_lens, batch.q_lens, strict=True)]
    for s in range(1, len(starts)):
        q_max, k_max = (max(x[first:s + 1]) for x in (batch.q_lens, batch.k_lens))
        full = (s - first + 1) * q_max * k_max > limit
        if s < len(shared) and (shared[s] > 0) == (shared[first] > 0) and not full:
            continue
        group, first = range(first, s), s
        q_max, k_max = (max(x[i] for i in group) for x in (batch.q_lens, batch.k_lens))
        q_index, k_index, keep = torch.zeros(len(group), q_max, dtype=torch.int64), [], []
        for row, i in enumerate(group):
            q_index[row, :batch.q_lens[i]] = starts[i] + torch.arange(batch.q_lens[i])
            k_index.append(F.pad(_key_index(batch, i, starts[i]), (0, k_max - batch.k_lens[i])))
            keep.append(row * q_max + torch.arange(batch.q_lens[i]))
        mask = None
        if shared[group[0]] > 0:      # query i of a segment sees its prompt and its own first i + 1 tokens
            last = torch.arange(q_max)[None, :] + torch.tensor([shared[i] for i in group])[:, None]    # [s,Q]
            mask = (torch.arange(k_max) <= last[:, :, None])[:, None].to(device)                   # [s,1,Q,K]
        layout.append((q_index.to(device), torch.stack(k_index).to(device), mask, torch.cat(keep).to(device)))
    return layout


def attention(q, k, v, batch):
    """Causal attention inside each segment. q [N,H,D], k and v [N,G,D] -> [N,H,D]."""
    kernel = varlen_kernel(q.device, q.dtype)
    kind, build = ("varlen", _varlen_layout) if kernel else ("padded", _padded_layout)
    if kind not in batch.layout:
        batch.layout[kind] = build(batch, q.device)
    if kernel:
        keys, *lengths = batch.layout[kind]
        return kernel[1](q, k[keys], v[keys], *lengths)
    out = []
    for q_index, k_index, mask, keep in batch.layout[kind]:
        heads = (x[i].transpose(1, 2) for x, i in ((q, q_index), (k, k_index), (v, k_index)))      # [s,H,Q,D]
        o = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        out.append(o.transpose(1, 2).flatten(0, 1)[keep])
    return torch.cat(out) if len(out) > 1 else out[0]


def rope_tables(config, length, device="cpu"):
    """cos and sin [length, D/2] in fp32, computed in fp64: in bf16 positions 256 and 257 would collide."""
    freq = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    return angle.cos().float().to(device), angle.sin().float().to(device)


def apply_rope(x, cos, sin):
    """Rotates the two halves of each head (the HF convention). x [N,H,D]; cos, sin [N,1,D/2] -> [N,H,D]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


# ------------------------------------------------------------------------------------------ token log-probs
def matmul_fp32(a, b):
    """a [M,E] @ b [E,N], fp32 for 16-bit operands too: logits rounded to bf16 would be off by up to 2^-9 of
    their size, far more than a log-prob may be."""
    if a.dtype in (torch.bfloat16, torch.float16):
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        a, b = a.float(), b.float()
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class _TokenLogp(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] and the entropy, without ever holding M x V logits: V goes in
    blocks. The backward recomputes each block and writes its rows of dW once, summed over all M."""

    @staticmethod
    def forward(ctx, h, weight, targets, temperature, vocab_limit, max_elements):
        acc = torch.promote_types(h.dtype, torch.float32)       # logits, sums and log-probs in fp32 (or fp64)
        m = h.shape[0]
        block = min(vocab_limit, max(256, max_elements // max(m, 1)))
        lse = torch.full((m,), torch.finfo(acc).min / 2, dtype=acc, device=h.device)
        chosen, mean_logp = torch.full_like(lse, -torch.inf), torch.zeros_like(lse)   # -inf: not an id
        for v in range(0, vocab_limit, block):
            w = weight[v:min(v + block, vocab_limit)].to(h.dtype)
            logits = matmul_fp32(h, w.T).div_(temperature)                                      # [M, block]
            inside = (targets >= v) & (targets < v + w.shape[0])
            picked = logits.gather(1, (targets - v).clamp(0, w.shape[0] - 1)[:, None])[:, 0]
            chosen = torch.where(inside, picked, chosen)
            new_lse = torch.logaddexp(lse, logits.logsumexp(-1))
            logp = logits.sub_(new_lse[:, None])            # so far; from it the entropy has no cancellation
            mean_logp = (mean_logp + lse - new_lse) * torch.exp(lse - new_lse) + (logp.exp() * logp).sum(-1)
            lse = new_lse
        ctx.save_for_backward(h, weight, targets, lse)
        ctx.constants = temperature, vocab_limit, block, acc
        ctx.mark_non_differentiable(mean_logp)
        return chosen - lse, mean_logp.neg_()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, _grad_entropy):
        h, weight, targets, lse = ctx.saved_tensors
        temperature, vocab_limit, block, acc = ctx.constants
        need_h, need_w = ctx.needs_input_grad[:2]
        scale = (grad_logp / temperature)[:, None]                                                 # [M,1]
        dh = torch.zeros(h.shape, dtype=acc, device=h.device) if need_h else None
        dw = torch.zeros_like(weight) if need_w else None
        for v in range(0, vocab_limit, block):
            w = weight[v:min(v + block, vocab_limit)].to(h.dtype)
            p = matmul_fp32(h, w.T).div_(temperature).sub_(lse[:, None]).exp_().mul_(-scale)
            inside = (targets >= v) & (targets < v + w.shape[0])
            p.scatter_add_(1, (targets - v).clamp(0, w.shape[0] - 1)[:, None], scale * inside[:, None])
            p = p.to(h.dtype)                                     # d loss / d (h w^T), [M, block]
            if need_h:
                dh += matmul_fp32(p, w)
            if need_w:
                dw[v:v + w.shape[0]] = matmul_fp32(p.T, h)
        return (dh.to(h.dtype) if need_h else None), dw, None, None, None, None


def token_logp(h, weight, targets, temperature=1.0, vocab_limit=None, max_elements=2 ** 24):
    """Log-prob of each target under softmax over ids < vocab_limit at `temperature`; the entropy (no grad).

    h [M,E], weight [V,E], targets [M] -> two fp32 [M] tensors (fp64 for fp64). Ids from `vocab_limit` on,
    unknown to the tokenizer, are outside the softmax as in the sampler: such a target has log-prob -inf. Peak
    extra memory is a few blocks of `max_elements` floats, whatever M and V are.
    """
    limit = weight.shape[0] if vocab_limit is None else min(vocab_limit, weight.shape[0])
    return _TokenLogp.apply(h, weight, targets, float(temperature), limit, max_elements)


# ------------------------------------------------------------------------------------------------------ model
class RMSNorm(nn.RMSNorm):
    """In fp32 inside (fp64 stays) and rounded once: nn.RMSNorm leaves its fused kernel, with a warning, for a
    bf16 input and an fp32 weight, and rounds twice when both are bf16."""

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)         # per head, before the rotation
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def forward(self, x, cos, sin, batch):
        heads = (-1, self.head_dim)
        q, k, v = (proj(x).unflatten(-1, heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(self.q_norm(q), cos, sin), apply_rope(self.k_norm(k), cos, sin)
        return self.o_proj(attention(q, k, v, batch).flatten(-2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, batch):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class Qwen3(nn.Module):
    """Weights in fp32 are the master weights; under bf16 autocast products run in bf16; norms, rotation and
    log-probs in fp32. `activation_checkpointing` recomputes each block in the backward."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.activation_checkpointing = False
        self._rope = None

    @property
    def head_weight(self):
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def init_weights(self, seed=0):
        """Random weights of this geometry (normal, initializer_range; norms 1), set by `seed` alone."""
        generator, std = torch.Generator(device="cpu").manual_seed(seed), self.config.initializer_range
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * std if p.ndim > 1 else torch.tensor(1.0))
        return self

    def rope(self, positions):
        """cos, sin [N,1,D/2] for `positions` [N], all below max_position_embeddings."""
        if self._rope is None or self._rope[0].device != positions.device:
            self._rope = rope_tables(self.config, self.config.max_position_embeddings, positions.device)
        return self._rope[0][positions][:, None], self._rope[1][positions][:, None]

    def hidden(self, batch):
        """Packed -> final hidden states [N,E], after the last norm."""
        x = self.model.embed_tokens(batch.tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))    # the residual stream in bf16, as in HF
        cos, sin = self.rope(batch.positions)
        for block in self.model.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, batch, use_reentrant=False)
            else:
                x = block(x, cos, sin, batch)
        return self.model.norm(x)

    def forward(self, batch, temperature=1.0, vocab_limit=None):
        """Packed -> logp [M], entropy [M] of the response tokens, in fp32. Only they reach the head."""
        h = self.hidden(batch)[batch.select]
        return token_logp(h, self.head_weight, batch.targets, temperature, vocab_limit)

    def logits(self, ids):
        """Full logits [T,V] (fp32, fp64) of one sequence: the obviously correct slow path, for tests."""
        h = self.hidden(pack([list(ids)], [], []).to(self.head_weight.device))
        return matmul_fp32(h, self.head_weight.T.to(h.dtype))


# ---------------------------------------------------------------------------------------------- HF folders
def local_folder(name_or_path):
    """A folder as it is, or the local snapshot of a hub name like Qwen/Qwen3-0.6B (fetched when needed)."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name_or_path)):
        raise FileNotFoundError(f"{name_or_path}: no such model folder")
    from huggingface_hub import snapshot_download
    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=wanted))
    except Exception as error:      # the hub client raises a dozen kinds; the user needs one line
        raise OSError(f"{name_or_path}: no such folder, and not available from the hub ({error})") from None


@contextlib.contextmanager
def open_tensors(path):
    """A safetensors file to read from; whatever is wrong with it becomes a ValueError that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from None


def _tensor_files(folder):
    """{tensor name: file} of a single-file or, when there is none, sharded folder; every file is there."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if path.is_file():
        with open_tensors(path) as file:
            return dict.fromkeys(file.keys(), path)
    if not index.is_file():
        raise FileNotFoundError(f"{path}: no such file (weights are read from safetensors only)")
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError(f"{index}: weight_map does not map tensor names to file names")
    for shard in sorted(set(shards.values())):
        if os.path.basename(shard) != shard or not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder / shard}: named by {index.name} but not there")
    return {name: folder / shard for name, shard in shards.items()}


def load_model(name_or_path, dtype=torch.float32, device="cpu"):
    """Qwen3 with the folder's weights. ValueError names a missing, unexpected or misshapen tensor or option;
    FileNotFoundError a missing file or shard. Nothing is unpickled."""
    folder = local_folder(name_or_path)
    config = ModelConfig.from_folder(folder)
    files = _tensor_files(folder)
    with torch.device("meta"):
        model = Qwen3(config)
    wanted = {name: p.shape for name, p in model.named_parameters()}
    if config.tie_word_embeddings and "lm_head.weight" in files:
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    for problem, names in (("is missing", wanted.keys() - files.keys()),
                           ("is not part of the model", files.keys() - wanted.keys())):
        if names:
            raise ValueError(f"{folder}: tensor {sorted(names)[0]} {problem} ({len(names)} in all)")
    state = {}
    for path in sorted(set(files.values())):
        with open_tensors(path) as file:
            for name in (n for n in files if files[n] == path):
                tensor = file.get_tensor(name)
                if tensor.shape != wanted[name]:
                    raise ValueError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, "
                                     f"the config asks for {tuple(wanted[name])}")
                state[name] = tensor.to(device, dtype, copy=True)     # not a view of a file that may change
    if config.tie_word_embeddings:      # a redundant head may be there; a different one is never just dropped
        head = state.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, state["model.embed_tokens.weight"]):
            raise ValueError(f"{files['lm_head.weight']}: tie_word_embeddings is true, "
                             "but lm_head.weight differs from model.embed_tokens.weight")
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(True)


def save_model(model, folder, source=None):
    """Writes config.json and model.safetensors (tied weights once, in their own dtype), copies tokenizer and
    generation config from `source`. transformers loads the folder back bit for bit."""
    folder, source = Path(folder), source and local_folder(source)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **model.config.raw}
    config |= {name: getattr(model.config, name) for name in _KINDS}      # rope_theta on top: transformers 4
    config["torch_dtype"] = config["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    ours = ("config.json", "model.safetensors.index.json", "manifest.json", "trainer_state.json")
    for path in sorted(source.iterdir()) if source and source.resolve() != folder.resolve() else ():
        if path.suffix in (".json", ".txt", ".jinja") and path.name not in ours:
            shutil.copyfile(path, folder / path.name)
