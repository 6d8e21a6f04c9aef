"""Qwen3 by hand: the packed forward pass, chunked token log-probs, Hugging Face folders in and out.

    model = load_model("Qwen/Qwen3-0.6B")            # or a folder; parameter names equal the Hugging Face names
    batch = pack([prompt], [0, 0], [resp_a, resp_b])
    logp, entropy = model(batch, temperature=1.0, vocab_limit=151669)     # one value per response token
    save_model(model, "out", source="Qwen/Qwen3-0.6B")

Everything a batch needs is computed once and nothing is padded: a prompt shared by K responses is run once, its
keys and values serve all K (`pack`). Letters in shape comments: N packed tokens, M response tokens, H query
heads, G key/value heads, D head size, E hidden size, V vocabulary. No sampling here (sample.py).
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
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
        """Raises ValueError naming the key when a key is missing or asks for something this file does not do."""
        if raw.get("model_type") != "qwen3":
            raise ValueError(f"{where}: model_type {raw.get('model_type')!r} is not supported, only 'qwen3' is")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ValueError(f"{where}: rope type {rope_type!r} is not supported, only 'default' is")
        for key, wanted in (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu")):
            if raw.get(key, wanted) != wanted:
                raise ValueError(f"{where}: {key} = {raw[key]!r} is not supported, only {wanted!r} is")
        found = dict(raw, rope_theta=raw.get("rope_theta", rope.get("rope_theta")))
        found.setdefault("tie_word_embeddings", False)
        names = [f.name for f in dataclasses.fields(cls) if f.name != "raw"]
        missing = [n for n in names if found.get(n) is None and n != "initializer_range"]
        if missing:
            raise ValueError(f"{where}: missing {', '.join(missing)}")
        config = cls(**{n: found[n] for n in names if found.get(n) is not None}, raw=dict(raw))
        if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
            raise ValueError(f"{where}: {config.num_attention_heads} query heads do not divide by "
                             f"{config.num_key_value_heads} key/value heads, or head_dim {config.head_dim} is odd")
        return config

    @classmethod
    def from_folder(cls, folder):
        path = Path(folder) / "config.json"
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")), where=str(path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from None


# --------------------------------------------------------------------------------------------- packed batches
@dataclasses.dataclass
class Packed:
    """S segments without padding: the distinct prompts, then the responses (each without its last token, which
    predicts nothing). A segment's queries are its own tokens; its keys are its prompt, then itself."""
    tokens: torch.Tensor        # [N] ids
    positions: torch.Tensor     # [N] position in its own sequence
    select: torch.Tensor        # [M] index into N of the state that predicts target m
    targets: torch.Tensor       # [M] every response token, response after response
    q_lens: list                # [S] queries of each segment; sums to N
    k_lens: list                # [S] keys of each segment, >= its queries
    k_starts: list              # [S] where the segment's prompt begins in N (itself for a prompt)
    layout: dict = dataclasses.field(default_factory=dict)      # per attention kernel, built on first use

    def to(self, device):
        moved = {n: getattr(self, n).to(device, non_blocking=True)
                 for n in ("tokens", "positions", "select", "targets")}
        return dataclasses.replace(self, **moved, layout={})


def pack(prompts, prompt_of, responses):
    """prompts: list of id lists; response i (ids, may be empty) continues prompts[prompt_of[i]]. -> Packed."""
    tokens, positions, q_lens, k_lens, k_starts, starts = [], [], [], [], [], []
    for ids in prompts:
        if not ids:
            raise ValueError("a prompt without tokens cannot be continued")
        starts.append(len(tokens))
        k_starts.append(len(tokens))
        tokens += ids
        positions += range(len(ids))
        q_lens.append(len(ids))
        k_lens.append(len(ids))
    select, targets = [], []
    for p, ids in zip(prompt_of, responses, strict=True):
        prompt_len = len(prompts[p])
        if not ids:
            continue
        select += [starts[p] + prompt_len - 1, *range(len(tokens), len(tokens) + len(ids) - 1)]
        targets += ids
        if len(ids) > 1:
            tokens += ids[:-1]
            positions += range(prompt_len, prompt_len + len(ids) - 1)
            q_lens.append(len(ids) - 1)
            k_lens.append(prompt_len + len(ids) - 1)
            k_starts.append(starts[p])
    as_ids = [torch.tensor(x, dtype=torch.int64) for x in (tokens, positions, select, targets)]
    return Packed(*as_ids, q_lens=q_lens, k_lens=k_lens, k_starts=k_starts)


# -------------------------------------------------------------------------------------------------- attention
def varlen_kernel(device, dtype):
    """The fastest variable-length attention at hand as (name, function), or None: flash-attn when importable,
    else PyTorch's own. Both want CUDA and 16-bit floats; everything else takes the padded path."""
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from flash_attn import flash_attn_varlen_func
        return "flash-attn", lambda q, k, v, cq, ck, mq, mk: flash_attn_varlen_func(
            q, k, v, cq, ck, mq, mk, causal=True)
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn
    return "torch varlen", lambda q, k, v, cq, ck, mq, mk: varlen_attn(
        q, _repeat_heads(k, q), _repeat_heads(v, q), cq, ck, mq, mk, window_size=(-1, 0))


def _repeat_heads(x, q):
    return x.repeat_interleave(q.shape[-2] // x.shape[-2], dim=-2)


def _key_index(batch, s, own_start):
    """Indices into N of segment s's keys: its prompt, then its own tokens."""
    shared = batch.k_lens[s] - batch.q_lens[s]
    start = batch.k_starts[s]
    return torch.cat([torch.arange(start, start + shared), torch.arange(own_start, own_start + batch.q_lens[s])])


def _varlen_layout(batch, device):
    starts = [0, *torch.tensor(batch.q_lens).cumsum(0).tolist()]
    keys = torch.cat([_key_index(batch, s, starts[s]) for s in range(len(batch.q_lens))])
    cu_k = F.pad(torch.tensor(batch.k_lens).cumsum(0), (1, 0))
    return (keys.to(device), torch.tensor(starts, dtype=torch.int32, device=device),
            cu_k.to(device, torch.int32), max(batch.q_lens), max(batch.k_lens))


def _padded_layout(batch, device, limit=2 ** 24):
    """Groups of consecutive segments for padded attention: (q_index [s,Q], k_index [s,K], mask or None, keep).
    A group holds prompts only (plain causal, no mask) or responses only, and at most `limit` scores per head."""
    groups, first, start, starts = [], 0, 0, []
    for s, q_len in enumerate(batch.q_lens):
        starts.append(start)
        start += q_len
    shared = [k - q for k, q in zip(batch.k_lens, batch.q_lens, strict=True)]
    for s in range(1, len(starts) + 1):
        q_max, k_max = (max(x[first:s + 1]) for x in (batch.q_lens, batch.k_lens))
        full = (s - first + 1) * q_max * k_max > limit
        if s == len(starts) or (shared[s] > 0) != (shared[first] > 0) or full:
            groups.append(range(first, s))
            first = s
    layout = []
    for group in groups:
        q_max, k_max = (max(x[s] for s in group) for x in (batch.q_lens, batch.k_lens))
        q_index, k_index, keep = torch.zeros(len(group), q_max, dtype=torch.int64), [], []
        for i, s in enumerate(group):
            q_index[i, :batch.q_lens[s]] = torch.arange(starts[s], starts[s] + batch.q_lens[s])
            k_index.append(F.pad(_key_index(batch, s, starts[s]), (0, k_max - batch.k_lens[s])))
            keep.append(torch.arange(i * q_max, i * q_max + batch.q_lens[s]))
        mask = None
        if shared[group[0]] > 0:      # query i of the segment sees its whole prompt and its own first i + 1 tokens
            last = torch.arange(q_max)[None, :] + torch.tensor([shared[s] for s in group])[:, None]    # [s,Q]
            mask = (torch.arange(k_max) <= last[:, :, None])[:, None].to(device)                   # [s,1,Q,K]
        layout.append((q_index.to(device), torch.stack(k_index).to(device), mask, torch.cat(keep).to(device)))
    return layout


def attention(q, k, v, batch):
    """Causal attention inside each segment. q [N,H,D], k and v [N,G,D] -> [N,H,D]."""
    kernel = varlen_kernel(q.device, q.dtype)
    if kernel:
        if "varlen" not in batch.layout:
            batch.layout["varlen"] = _varlen_layout(batch, q.device)
        keys, *rest = batch.layout["varlen"]
        return kernel[1](q, k[keys], v[keys], *rest)
    if "padded" not in batch.layout:
        batch.layout["padded"] = _padded_layout(batch, q.device)
    out = []
    for q_index, k_index, mask, keep in batch.layout["padded"]:
        qs, ks, vs = (x[i].transpose(1, 2) for x, i in ((q, q_index), (k, k_index), (v, k_index)))   # [s,H,Q,D]
        o = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
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
class _TokenLogp(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] and the entropy, without ever holding M x V logits: V goes in
    blocks. The backward recomputes each block and writes its rows of dW once, summed over all M in one product."""

    @staticmethod
    def forward(ctx, h, weight, targets, temperature, vocab_limit, max_elements):
        acc = torch.promote_types(h.dtype, torch.float32)        # logits, sums and log-probs in fp32 (or fp64)
        m = h.shape[0]
        block = min(vocab_limit, max(256, max_elements // max(m, 1)))
        lse = torch.full((m,), -torch.inf, dtype=acc, device=h.device)
        mean_logit, chosen = torch.zeros_like(lse), torch.zeros_like(lse)
        for v in range(0, vocab_limit, block):
            w = weight[v:min(v + block, vocab_limit)].to(h.dtype)
            logits = (h @ w.T).to(acc).div_(temperature)                                        # [M, block]
            inside = (targets >= v) & (targets < v + w.shape[0])
            picked = logits.gather(1, (targets - v).clamp(0, w.shape[0] - 1)[:, None])[:, 0]
            chosen = torch.where(inside, picked, chosen)
            new_lse = torch.logaddexp(lse, logits.logsumexp(-1))
            p_logit = torch.exp(logits - new_lse[:, None]).mul_(logits).sum(-1)
            mean_logit = mean_logit * torch.exp(lse - new_lse) + p_logit
            lse = new_lse
        ctx.save_for_backward(h, weight, targets, lse)
        ctx.constants = temperature, vocab_limit, block, acc
        entropy = lse - mean_logit
        ctx.mark_non_differentiable(entropy)
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx, grad_logp, _grad_entropy):
        h, weight, targets, lse = ctx.saved_tensors
        temperature, vocab_limit, block, acc = ctx.constants
        need_h, need_w = ctx.needs_input_grad[:2]
        scale = (grad_logp / temperature)[:, None]                                                 # [M,1]
        dh = torch.zeros(h.shape, dtype=acc, device=h.device) if need_h else None
        dw = torch.zeros_like(weight) if need_w else None
        for v in range(0, vocab_limit, block):
            w = weight[v:min(v + block, vocab_limit)].to(h.dtype)
            p = (h @ w.T).to(acc).div_(temperature).sub_(lse[:, None]).exp_().mul_(-scale)
            inside = (targets >= v) & (targets < v + w.shape[0])
            p.scatter_add_(1, (targets - v).clamp(0, w.shape[0] - 1)[:, None], scale * inside[:, None])
            p = p.to(h.dtype)                                     # d loss / d (h w^T), [M, block]
            if need_h:
                dh += p @ w
            if need_w:
                dw[v:v + w.shape[0]] = p.T @ h
        return (dh.to(h.dtype) if need_h else None), dw, None, None, None, None


def token_logp(h, weight, targets, temperature=1.0, vocab_limit=None, max_elements=2 ** 24):
    """Log-prob of each target under softmax over ids < vocab_limit at `temperature`, and that entropy (no grad).

    h [M,E], weight [V,E], targets [M] -> two fp32 [M] tensors (fp64 for fp64 input). Ids from `vocab_limit` on,
    which the tokenizer does not have, are outside the softmax here as in the sampler. Peak extra memory is a few
    blocks of `max_elements` floats, whatever M and V are.
    """
    limit = weight.shape[0] if vocab_limit is None else min(vocab_limit, weight.shape[0])
    return _TokenLogp.apply(h, weight, targets, float(temperature), limit, max_elements)


# ------------------------------------------------------------------------------------------------------ model
class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)         # per head, before the rotation
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def forward(self, x, cos, sin, batch):
        heads = (-1, self.head_dim)
        q, k, v = (proj(x).unflatten(-1, heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = apply_rope(self.q_norm(q), cos, sin).to(v.dtype)
        k = apply_rope(self.k_norm(k), cos, sin).to(v.dtype)
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
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, cos, sin, batch):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class Qwen3(nn.Module):
    """Weights in fp32 are the master weights; under bf16 autocast the products run in bf16, norms, rotation and
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
        """Random weights of this geometry (normal, initializer_range; norms 1), a function of `seed` alone."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator)
                                     * self.config.initializer_range)
        return self

    def rope(self, positions):
        """cos, sin [N,1,D/2] for `positions` [N], from tables that grow by doubling."""
        device = positions.device
        if self._rope is None or self._rope[0].device != device:
            self._rope = rope_tables(self.config, self.config.max_position_embeddings, device)
        return self._rope[0][positions][:, None], self._rope[1][positions][:, None]

    def hidden(self, batch):
        """Packed -> final hidden states [N,E], after the last norm."""
        x = self.model.embed_tokens(batch.tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))       # the residual stream in the compute dtype, as in HF
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
        if torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))
        return token_logp(h, self.head_weight, batch.targets, temperature, vocab_limit)

    def logits(self, ids):
        """Full logits [T,V] in fp32 of one sequence of ids: the obviously correct slow path, for tests."""
        batch = pack([list(ids)], [], []).to(self.head_weight.device)
        return F.linear(self.hidden(batch), self.head_weight).float()


# ---------------------------------------------------------------------------------------------- HF folders
def local_folder(name_or_path):
    """A folder as it is, or the local snapshot of a hub name such as Qwen/Qwen3-0.6B (downloaded when needed)."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    parts = str(name_or_path).split("/")
    if len(parts) != 2 or not all(parts) or str(name_or_path).startswith((".", "~")):
        raise FileNotFoundError(f"{name_or_path}: no such model folder")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as error:      # the hub client raises a dozen kinds; the user needs one line
        raise OSError(f"{name_or_path}: no such folder, and not available from the hub ({error})") from None


def _tensor_files(folder):
    """{tensor name: file} of a single-file or sharded safetensors folder; every file named is on disk."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for shard in sorted(set(shards.values())):
            if os.path.basename(shard) != shard or not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder / shard}: named by {index.name} but not there")
        return {name: folder / shard for name, shard in shards.items()}
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (weights are read from safetensors only)")
    with _open(path) as file:
        return {name: path for name in file.keys()}


def _open(path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from None


def load_model(name_or_path, dtype=torch.float32, device="cpu"):
    """Qwen3 with the folder's weights. ValueError names a missing, unexpected or misshapen tensor, a rope type or
    architecture this file does not do; FileNotFoundError a missing file or shard. Nothing is unpickled."""
    folder = local_folder(name_or_path)
    config = ModelConfig.from_folder(folder)
    files = _tensor_files(folder)
    with torch.device("meta"):
        model = Qwen3(config)
    wanted = dict(model.named_parameters())
    head = files.pop("lm_head.weight", None) if config.tie_word_embeddings else None
    for problem, names in (("is missing", wanted.keys() - files.keys()),
                           ("is not part of the model", files.keys() - wanted.keys())):
        if names:
            raise ValueError(f"{folder}: tensor {sorted(names)[0]} {problem} ({len(names)} in all)")
    opened = {path: _open(path) for path in sorted({*files.values(), *filter(None, [head])})}
    state = {}
    for name, path in files.items():
        tensor = opened[path].get_tensor(name)
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, "
                             f"the config asks for {tuple(wanted[name].shape)}")
        state[name] = tensor.to(device, dtype)
    if head:        # a tied checkpoint may carry a redundant head; a different one must not be dropped silently
        stored = opened[head].get_tensor("lm_head.weight")
        if not torch.equal(stored.to(device, dtype), state["model.embed_tokens.weight"]):
            raise ValueError(f"{head}: tie_word_embeddings is true but lm_head.weight differs from embed_tokens")
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(True)


def save_model(model, folder, source=None):
    """Writes config.json and model.safetensors (tied weights once, in their own dtype), and copies tokenizer and
    generation config from `source`. transformers loads the folder back bit for bit."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    config = {k: v for k, v in model.config.raw.items() if k not in ("dtype", "torch_dtype")}
    config["torch_dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for path in sorted(local_folder(source).iterdir()) if source else ():
        if path.suffix in (".json", ".txt", ".jinja") and path.name not in (
                "config.json", "model.safetensors.index.json", "manifest.json", "trainer_state.json"):
            shutil.copyfile(path, folder / path.name)
