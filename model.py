"""Qwen3 by hand: the packed forward pass, chunked token log-probs, Hugging Face folders in and out.

    model = load_model("Qwen/Qwen3-0.6B")      # or a folder; parameter names equal the Hugging Face names
    batch = pack([prompt], [0, 0], [resp_a, resp_b])     # unpadded; responses share their prompt's run
    logp, entropy = model(batch, temperature=1.0, vocab_limit=151669)     # one value per response token
    save_model(model, "out", source="Qwen/Qwen3-0.6B")

Letters in shapes: N packed tokens, M response tokens, S segments, H query heads, G key/value heads, D head
size, E hidden size, V vocabulary. No sampling here (sample.py).
"""

import contextlib
import dataclasses
import json
from functools import cache, partial
from itertools import accumulate, chain
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from data import local_path


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
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    raw: dict = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, raw, where="config.json"):
        """Raises ValueError naming the key that is missing, malformed or asks for what is not done here."""
        only = {"model_type": "qwen3", "attention_bias": False, "use_sliding_window": False,
                "hidden_act": "silu", "rope_type": "default", "type": "default"}
        ropes = [raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
        for key, value in chain({"model_type": None, **raw}.items(), *(rope.items() for rope in ropes)):
            if key in only and value != only[key]:
                raise ValueError(f"{where}: {key} {value!r} is not supported, only {only[key]!r} is")
        thetas = {rope.get("rope_theta") for rope in (raw, *ropes)} - {None}       # on top in older folders
        if len(thetas) > 1:
            raise ValueError(f"{where}: contradicting values of rope_theta: {thetas}")
        found = {**vars(cls), **raw, "rope_theta": max(thetas, default=None)}       # vars: the defaults above
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
        return cls.from_dict(_read_json(Path(folder) / "config.json"), str(Path(folder) / "config.json"))


_KINDS = {field.name: field.type for field in dataclasses.fields(ModelConfig) if field.name != "raw"}


def _read_json(path):
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a JSON object ({error})") from None


@dataclasses.dataclass
class Packed:
    """S segments: the distinct prompts, then the responses (without their last tokens: they predict nothing).
    A segment's queries are its own tokens; its keys are its prompt, then itself."""
    tokens: torch.Tensor        # [N] ids
    positions: torch.Tensor     # [N] position in its own sequence
    select: torch.Tensor        # [M] index into N of the state that predicts target m
    targets: torch.Tensor       # [M] every response token, response after response
    q_lens: list                # [S] queries of each segment; sums to N
    keys: list                  # [S] tensors of indices into N
    layout: dict = dataclasses.field(default_factory=dict)      # per attention kernel, built on first use

    def to(self, device):
        moved = {key: x.to(device, non_blocking=True) for key, x in vars(self).items() if torch.is_tensor(x)}
        return dataclasses.replace(self, **moved, layout={})


def pack(prompts, prompt_of, responses):
    """prompts: id lists; response i (an id list, may be empty) continues prompts[prompt_of[i]]. -> Packed."""
    if not all(prompts):
        raise ValueError("a prompt without tokens cannot be continued")
    q_lens, ends = list(map(len, prompts)), list(accumulate(map(len, prompts)))
    tokens, shared, select, targets = list(chain(*prompts)), [torch.arange(0)] * len(prompts), [], []
    for p, ids in zip(prompt_of, responses, strict=True):
        select += [ends[p] - 1, *range(len(tokens), len(tokens) + len(ids) - 1)][:len(ids)]
        targets += ids
        if len(ids) > 1:
            tokens += ids[:-1]
            q_lens.append(len(ids) - 1)
            shared.append(torch.arange(ends[p] - len(prompts[p]), ends[p]))
    keys = [torch.cat(pair) for pair in zip(shared, torch.arange(len(tokens)).split(q_lens), strict=True)]
    positions = [i for x, q in zip(keys, q_lens, strict=True) for i in range(len(x) - q, len(x))]
    return Packed(*map(torch.LongTensor, (tokens, positions, select, targets)), q_lens, keys)


@cache         # a failing import of flash-attn searches the whole path: once, not once per layer
def varlen_kernel(device, dtype):
    """(name, function) of the fastest variable-length attention: flash-attn when importable, else PyTorch's.
    Both want CUDA and 16-bit floats; everything else gets None and takes the padded path."""
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from flash_attn import flash_attn_varlen_func
        return "flash-attn", partial(flash_attn_varlen_func, causal=True)
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn
    return "torch varlen", lambda q, k, v, *lengths: varlen_attn(
        q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)), *lengths, window_size=(-1, 0))


def _padded_layout(batch, device, limit=2 ** 24):
    """Yields groups of segments for padded attention: (q_index [s,Q], k_index [s,K], mask or None, keep). All
    are prompts (plain causal, no mask) or all responses, with at most `limit` scores per head; keep: which of
    the s*Q places hold a query."""
    indices = torch.arange(len(batch.tokens)).split(batch.q_lens), batch.keys
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_value=-1)
    shared = [len(keys) - q for keys, q in zip(batch.keys, batch.q_lens, strict=True)]
    for begin, end in ((0, shared.count(0)), (shared.count(0), len(shared))):
        q_max, k_max = (max(map(len, x[begin:end]), default=1) for x in indices)
        rows = max(1, limit // (q_max * k_max))
        for group in (slice(i, min(i + rows, end)) for i in range(begin, end, rows)):
            q_index, k_index = (pad(x[group]) for x in indices)
            keep, mask = (q_index >= 0).flatten().nonzero()[:, 0], None
            if begin:                 # query i of a segment sees its prompt and its own first i + 1 tokens
                seen = torch.tensor(shared[group])[:, None] + torch.arange(q_index.shape[1])         # [s,Q]
                mask = (torch.arange(k_index.shape[1]) <= seen[:, :, None])[:, None].to(device)  # [s,1,Q,K]
            yield q_index.to(device), k_index.to(device), mask, keep.to(device)


def _query_blocks(batch, size=32):
    """As `_padded_layout`, for prompts alone: blocks of queries, each with the keys up to its last one, since
    PyTorch's attention on a CPU computes what a mask hides. Slices: nothing is copied or padded."""
    seen = torch.ones(size, max(batch.q_lens) + size, dtype=torch.bool).tril_(max(batch.q_lens))
    for begin, n in zip(accumulate(batch.q_lens, initial=0), batch.q_lens, strict=False):
        for i, j in ((i, min(i + size, n)) for i in range(0, n, size)):     # query i sees keys up to i
            yield ((None, slice(begin + i, begin + j)), (None, slice(begin, begin + j)),
                   seen[:j - i, -size - i:][:, :j], slice(None))


def attention(q, k, v, batch):
    """Causal attention inside each segment. q [N,H,D], k and v [N,G,D] -> [N,H,D]."""
    kernel, layout, out = varlen_kernel(q.device, q.dtype), batch.layout, []
    if kernel and "varlen" not in layout:       # where queries and keys of each segment begin, the longest
        lens = batch.q_lens, [len(keys) for keys in batch.keys]
        begins = (torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=q.device) for x in lens)
        layout["varlen"] = torch.cat(batch.keys).to(q.device), *begins, *map(max, lens)
    if kernel:
        keys, *lengths = layout["varlen"]
        return kernel[1](q, k[keys], v[keys], *lengths)
    # long prompts without responses (prefill) on a CPU in blocks; the rest padded, in few products
    blocks = q.is_cpu and not len(batch.select) and q.numel() > 2 ** 14 * len(batch.q_lens)
    name = "blocks" if blocks else "padded"
    if name not in layout:
        layout[name] = list(_query_blocks(batch) if blocks else _padded_layout(batch, q.device))
    for q_index, k_index, mask, keep in layout[name]:
        heads = (x[i].transpose(1, 2) for x, i in ((q, q_index), (k, k_index), (v, k_index)))      # [s,H,Q,D]
        o = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        out.append(o.transpose(1, 2).flatten(0, 1)[keep])
    return torch.cat(out)


def rope_tables(config, length, device="cpu"):
    """cos and sin [length, D/2] in fp32, computed in fp64: in bf16 positions 256 and 257 would collide."""
    wide = {"dtype": torch.float64, "device": "cpu" if torch.device(device).type == "mps" else device}
    freq = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, **wide) / config.head_dim)
    angle = torch.arange(length, **wide)[:, None] * freq
    return angle.cos().float().to(device), angle.sin().float().to(device)


def apply_rope(x, cos, sin):
    """Rotates the two halves of each head (the HF convention). x [N,H,D]; cos, sin [N,1,D/2] -> [N,H,D]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@cache
def onednn(dtype=torch.float32):
    """f(x [N,in], w [out,in]) -> x w^T by oneDNN, or None where torch has none for `dtype`. Why in fp32:
    torch.mm calls MKL, which reaches half of its speed on AMD."""
    with contextlib.suppress(AttributeError, RuntimeError):
        op = torch.ops.mkldnn._linear_pointwise
        op(*torch.zeros(2, 2, 2, dtype=dtype), None, "none", [], "")
        return lambda x, w: op(x, w, None, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    """x [N,in] w^T in fp32 on a CPU, and both gradients, that of w by its shorter side."""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return onednn()(x, w)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return onednn()(g, w.T), (onednn()(x.T, g.T).T if w.shape[1] < len(w) else onednn()(g.T, x.T))


def linear(x, w):
    """x [N,in], w [out,in] -> x w^T [N,out]: by oneDNN for fp32 on a CPU, else F.linear (in compiled blocks
    too: there oneDNN takes frozen weights only)."""
    fp32 = x.is_cpu and x.dtype == w.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    ours = fp32 and x.ndim == 2 and x.numel() and not torch.compiler.is_compiling() and onednn()
    return _OneDNNLinear.apply(x, w) if ours else F.linear(x, w)


def linear_fp32(x, w):
    """x [N,in] w^T -> [N,out] in fp32 (fp64): logits in bf16 would be off by up to 2^-9 of their size."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, w.T, out_dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return linear(x.to(wide), w.to(wide))


class _TokenLogp(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] and the entropy, without ever holding M x V logits: V goes in
    blocks. The backward recomputes each block and writes its rows of dW once, summed over all M."""
    @staticmethod
    def forward(ctx, h, weight, targets, temperature, vocab_limit, max_elements):
        acc, m = torch.promote_types(h.dtype, torch.float32), len(h)      # all sums in fp32 (or fp64)
        block = min(vocab_limit, max(256, max_elements // max(m, 1)))
        top = torch.full((m,), torch.finfo(acc).min / 2, dtype=acc, device=h.device)    # largest logit so far
        total, moment = torch.zeros_like(top), torch.zeros_like(top)   # sums of e^x, x e^x, x = logit - top
        chosen = torch.full_like(top, -torch.inf)                         # -inf: not an id
        for v in range(0, vocab_limit, block):
            w = weight[v:min(v + block, vocab_limit)].to(h.dtype)
            logits = linear_fp32(h, w).div_(temperature)                                        # [M, block]
            picked = logits.gather(1, (targets - v).clamp(0, len(w) - 1)[:, None])[:, 0]
            chosen = torch.where((targets >= v) & (targets < v + len(w)), picked, chosen)
            before, top = top, torch.maximum(top, logits.amax(-1))
            x, shrink = logits.sub_(top[:, None]), (before - top).exp()
            e = x.exp()
            moment, total = (moment + (before - top) * total) * shrink, total * shrink + e.sum(-1)
            moment += e.mul_(x).sum(-1)             # no product of matrices: autocast would round it to bf16
        ctx.save_for_backward(h, weight, targets, top, total)   # lse = top + log total would lose digits
        ctx.constants = temperature, vocab_limit, block
        entropy = total.log() - moment / total
        ctx.mark_non_differentiable(entropy)
        return chosen - top - total.log(), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logp, _grad_entropy):
        h, weight, targets, top, total = ctx.saved_tensors
        temperature, vocab_limit, block = ctx.constants
        scale = (grad_logp / temperature)[:, None]                                                 # [M,1]
        dh = torch.zeros_like(h, dtype=top.dtype)
        dw = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for v in range(0, vocab_limit, block):
            w = weight[v:min(v + block, vocab_limit)].to(h.dtype)
            p = linear_fp32(h, w).div_(temperature).sub_(top[:, None]).exp_().mul_(-scale / total[:, None])
            own = scale * ((targets >= v) & (targets < v + len(w)))[:, None]
            p = p.scatter_add_(1, (targets - v).clamp(0, len(w) - 1)[:, None], own).to(h.dtype)
            dh += linear(p, w.T)                    # in the compute dtype, as any gradient of a linear layer
            if dw is not None:
                dw[v:v + len(w)] = linear(p.T, h.T)
        return dh.to(h.dtype), dw, None, None, None, None


def token_logp(h, weight, targets, temperature=1.0, vocab_limit=None, max_elements=None):
    """Log-prob of each target under softmax over ids < vocab_limit at `temperature`; the entropy (no grad).
    h [M,E], weight [V,E], targets [M] -> two fp32 (fp64) [M]. Ids from `vocab_limit` on are outside as in the
    sampler: such a target has log-prob -inf. Extra memory: a few blocks of `max_elements` floats, 256 ids at
    least (default: 2^24 on CUDA, 2^22 on a CPU, where larger ones go back to the system: page faults)."""
    limit, size = min(vocab_limit or len(weight), len(weight)), max_elements or 2 ** (24 if h.is_cuda else 22)
    return _TokenLogp.apply(h, weight, targets, float(temperature), limit, size)


class RMSNorm(nn.RMSNorm):
    """In fp32 inside (fp64 stays), rounded once. nn.RMSNorm isn't fused for bf16 x and an fp32 weight."""
    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


class Linear(nn.Linear):
    """Without bias."""
    def forward(self, x):
        return linear(x, self.weight)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        E, D, inner = c.hidden_size, c.head_dim, c.intermediate_size
        H, G = c.num_attention_heads, c.num_key_value_heads
        dense, norm = partial(Linear, bias=False), partial(RMSNorm, eps=c.rms_norm_eps)
        self.attention = attention          # an attribute, so that `compile_blocks` can wrap it
        self.input_layernorm = norm(E)
        self.self_attn = nn.ModuleDict({
            "q_proj": dense(E, H * D), "k_proj": dense(E, G * D), "v_proj": dense(E, G * D),
            "o_proj": dense(H * D, E), "q_norm": norm(D), "k_norm": norm(D)})
        self.post_attention_layernorm = norm(E)
        self.mlp = nn.ModuleDict({"gate_proj": dense(E, inner), "up_proj": dense(E, inner),
                                  "down_proj": dense(inner, E)})

    def forward(self, x, cos, sin, batch):
        a, m, y = self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (proj(y).unflatten(-1, (-1, cos.shape[-1] * 2)) for proj in (a.q_proj, a.k_proj, a.v_proj))
        q, k = apply_rope(a.q_norm(q), cos, sin), apply_rope(a.k_norm(k), cos, sin)     # norms per head
        x = x + a.o_proj(self.attention(q, k, v, batch).flatten(-2))
        y = self.post_attention_layernorm(x)
        return x + m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))


class Qwen3(nn.Module):
    """Weights in fp32 are the master weights; under bf16 autocast products run in bf16; norms, rotation and
    log-probs in fp32. `activation_checkpointing` recomputes each block in the backward."""
    def __init__(self, config):
        super().__init__()
        self.config, self.activation_checkpointing = config, False
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, eps=config.rms_norm_eps)})
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self):
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def init_weights(self, seed=0):
        """Random weights of this geometry (normal, initializer_range; norms 1), set by `seed` alone."""
        generator, std = torch.Generator(device="cpu").manual_seed(seed), self.config.initializer_range
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator) * std if p.ndim > 1 else torch.tensor(1.0))
        return self

    def compile_blocks(self):
        """torch.compile fuses the small operations of each block, once for all blocks and shapes; attention
        stays as it is. ValueError where there is no compiler, which else would show in the first step."""
        for block in self.model.layers:
            block.attention = torch.compiler.disable(attention)
            block.compile(dynamic=True)
        try:
            self(pack([[0, 0]], [0], [[0, 0]]).to(self.head_weight.device))
        except Exception as error:      # no C++ compiler, no Triton: each has its own kind
            raise ValueError(f"--compile: torch.compile fails here: {error!r:.200}") from None

    def hidden(self, batch):
        """Packed -> final hidden states [N,E], after the last norm."""
        x = self.model.embed_tokens(batch.tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))    # the residual stream in bf16, as in HF
        tables = rope_tables(self.config, max(map(len, batch.keys)), x.device)
        inputs = *(table[batch.positions][:, None] for table in tables), batch       # cos, sin [N,1,D/2]
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.model.layers:
            x = checkpoint(block, x, *inputs, use_reentrant=False) if recompute else block(x, *inputs)
        return self.model.norm(x)

    def forward(self, batch, temperature=1.0, vocab_limit=None):
        """Packed -> logp [M], entropy [M] of the response tokens, in fp32. Only they reach the head."""
        h = self.hidden(batch)[batch.select]
        return token_logp(h, self.head_weight, batch.targets, temperature, vocab_limit)

    def logits(self, ids):
        """Full logits [T,V] (fp32, fp64) of one sequence: the obviously correct slow path, for tests."""
        h = self.hidden(pack([list(ids)], [], []).to(self.head_weight.device))
        return linear_fp32(h, self.head_weight.to(h.dtype))


def local_folder(name_or_path):
    """A folder as it is, or the local snapshot of a hub name like Qwen/Qwen3-0.6B (fetched when needed)."""
    return local_path(name_or_path, "model", ["*.json", "*.safetensors", "*.txt", "*.jinja"])


def read_tensors(path):
    """{name: tensor} of a safetensors file: views of it, so copy them. ValueError names a broken file."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a complete safetensors file ({error})") from None


def load_model(name_or_path, dtype=torch.float32, device="cpu"):
    """Qwen3 with the folder's weights. ValueError names a missing, unexpected or misshapen tensor or option;
    FileNotFoundError a missing file or shard. Nothing is unpickled."""
    folder = local_folder(name_or_path)
    config, path = ModelConfig.from_folder(folder), folder / "model.safetensors"
    index, embed = folder / "model.safetensors.index.json", "model.embed_tokens.weight"
    if path.is_file():
        found = {name: (path, tensor) for name, tensor in read_tensors(path).items()}
    elif index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ValueError(f"{index}: weight_map does not map tensor names to file names")
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder / shard}: named by {index.name} but not there")
        tensors = {shard: read_tensors(folder / shard) for shard in set(shards.values())}
        found = {name: (folder / shard, tensors[shard].get(name)) for name, shard in shards.items()}
    else:
        raise FileNotFoundError(f"{path}: no such file (weights are read from safetensors only)")
    with torch.device("meta"):
        model = Qwen3(config)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if config.tie_word_embeddings and "lm_head.weight" in found:    # redundant; but never just dropped
        wanted["lm_head.weight"] = wanted[embed]
    for problem, names in (("is missing", wanted.keys() - found.keys()),
                           ("is not part of the model", found.keys() - wanted.keys())):
        if names:
            raise ValueError(f"{folder}: tensor {min(names)} {problem} ({len(names)} in all)")
    for name, (path, tensor) in found.items():
        shape = None if tensor is None else tuple(tensor.shape)          # None: not where the index says
        if shape != wanted[name]:
            raise ValueError(f"{path}: tensor {name} has shape {shape}, the config asks for {wanted[name]}")
    state = {name: tensor.to(device, dtype, copy=True) for name, (_, tensor) in found.items()}
    if config.tie_word_embeddings and not state.pop("lm_head.weight", state[embed]).equal(state[embed]):
        raise ValueError(f"{found['lm_head.weight'][0]}: tie_word_embeddings is true, "
                         f"but lm_head.weight differs from {embed}")
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
            (folder / path.name).write_bytes(path.read_bytes())
