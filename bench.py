"""Speed, measured beside the peers in the same process, in turns: the sampler, the learner, a whole step.

    python bench.py sampler     # against transformers.generate: prefill, decode, shared prompts, refill
    python bench.py learner     # against a plain transformers forward and backward with full logits
    python bench.py step        # a whole RL step against TRL's GRPOTrainer (pip install trl)
    python bench.py sampler --device cuda --json figures.json

Every figure is the median of `--repeats` turns, ours and the peer's alternating after one warm-up of each;
`ratio` is the median of the pairwise ratios (above 1: ours is faster). Random weights, real geometries, no
download. Shares are of the matrix-product rate and memory bandwidth measured on this machine just before. Not
here: time and memory against response length, K and model size (runs/scaling.py)."""

import contextlib
import ctypes
import dataclasses
import gc
import json
import re
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence

import cli
import distributed
import train
from model import ModelConfig, Qwen3, linear, pack
from sample import Sampler, Sampling

NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")
SIZES = {"tiny": dict(zip(NAMES, (512, 128, 384, 4, 4, 2, 32, 512), strict=True)),
         "0.6B": dict(zip(NAMES, (151936, 1024, 3072, 28, 16, 8, 128, 40960), strict=True))}


@dataclasses.dataclass
class Config:
    what: Literal["sampler", "learner", "step"]     # the comparison
    device: str = "auto"                    # auto: CUDA where there is one
    repeats: int = 5                        # turns per figure (the 0.6B cases on a CPU take half)
    only: Literal["", "tiny", "0.6B"] = ""  # one of the two models
    json: str = ""                          # also write the cases there: name, ours, peer, ratio, ...


def medians(pairs):
    """Of (ours, peer): ours, the peer's, and of the pairwise ratios."""
    return (*map(statistics.median, zip(*pairs, strict=True)), statistics.median(y / x for x, y in pairs))


def turns(functions, repeats, device):
    """Calls the functions in turn, after one warm-up of each -> their seconds, a list a turn."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(f):
        gc.collect()
        wait()
        start = time.perf_counter()
        f()
        wait()
        return time.perf_counter() - start
    return [[timed(f) for f in functions] for _ in range(repeats + 1)][1:]


def limits(device, dtype):
    """(matrix-product FLOP/s at 1,024^3, copy bytes/s) of this machine now."""
    a, b = (torch.randn(1024, 1024, device=device).to(dtype) for _ in range(2))
    big, other = (torch.empty(2 ** 26, device=device) for _ in range(2))
    product, copied, _ = medians(turns((lambda: linear(a, b), lambda: other.copy_(big)), 10, device))
    return 2 * 1024 ** 3 / product, 2 * big.nbytes / copied


def peak_mib(device, f):
    """Peak memory of f in MiB beyond what was there: CUDA's allocator, else the process (Linux only)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    with contextlib.suppress(OSError, AttributeError):      # forbidden, or another C library
        ctypes.CDLL(None).malloc_trim(0)                    # gives back what is free
        Path("/proc/self/clear_refs").write_text("5")       # forgets the old peak
    before = Path("/proc/self/status").read_text()
    f()
    peak = Path("/proc/self/status").read_text()
    return (int(re.search(r"VmHWM:\s+(\d+)", peak)[1]) - int(re.search(r"VmRSS:\s+(\d+)", before)[1])) / 1024


def show(cases, name, unit, ours, peer=None, ratio=None, **more):
    cases.append({"name": name, "unit": unit, "ours": ours, "peer": peer, "ratio": ratio, **more})
    print(f"{name:<44} {ours:>10.4g} {f'{peer:.4g}' if peer else '':>10} {unit:<9}",
          f"ratio {ratio:>6.2f}" if ratio else "", *(f"  {k} {v:.3g}" for k, v in more.items()), flush=True)


def matmul_flops(c, with_head=True):
    """Forward FLOPs of the matrix products per token (attention scores not counted); c: one of SIZES."""
    layer = c["hidden_size"] * (c["head_dim"] * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
                                + 3 * c["intermediate_size"])
    return 2 * (c["num_hidden_layers"] * layer + with_head * c["vocab_size"] * c["hidden_size"])


def random_ids(count, length, vocab, seed=1):
    return torch.randint(0, vocab, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


class Bench:
    """One model twice (ours, and the same random weights in transformers) with the limits of this machine."""

    def __init__(self, size, cfg, device, cases):
        from transformers import Qwen3Config, Qwen3ForCausalLM
        self.size, self.device, self.cases, self.shape = size, device, cases, SIZES[size]
        self.dtype = torch.float32 if size == "tiny" else torch.bfloat16
        self.repeats = cfg.repeats if size == "tiny" or device.type == "cuda" else max(1, cfg.repeats // 2)
        options = dict(self.shape, tie_word_embeddings=True, rms_norm_eps=1e-6, attention_bias=False,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e6})
        self.ours = Qwen3(ModelConfig.from_dict(options | {"model_type": "qwen3"})).init_weights(0).to(device)
        self.peer = Qwen3ForCausalLM.from_pretrained(None, config=Qwen3Config(**options), dtype=self.dtype,
                                                     state_dict=self.ours.state_dict()).to(device)
        self.peer.generation_config.eos_token_id = None
        self.flops, self.bandwidth = limits(device, self.dtype)
        print(f"{size} {self.dtype}: {self.flops / 1e9:.0f} GFLOP/s, memory {self.bandwidth / 1e9:.0f} GB/s")

    def rates(self, name, tokens, pairs, flops=0, memory=(), **more):
        """One case in tokens/s from pairs of seconds, ours and the peer's. flops: the work of ours; memory:
        both functions, to measure their peaks."""
        a, b, ratio = medians(pairs)
        more = ({"matmul_share": flops / a / self.flops} if flops else {}) | more
        for side, f in zip(("ours", "peer"), memory):
            more[f"{side}_mib"] = peak_mib(self.device, f)
        show(self.cases, name, "tok/s", tokens / a, tokens / b, ratio, **more)


def bench_sampler(b):
    """Prefill (one new token), the whole, and decode: what the other tokens add, of the same turn."""
    rows, length = 32, 30 if b.size == "tiny" else 100
    prompts = random_ids(rows, length, b.shape["vocab_size"])
    ids, weights = torch.tensor(prompts, device=b.device), sum(p.nbytes for p in b.peer.parameters())
    sampler = Sampler(b.ours, [], b.shape["vocab_size"], rows, b.dtype)

    def ours(new):
        sampler.generate(prompts, list(range(rows)), 1, 0, 0, Sampling(max_new_tokens=new))

    @torch.inference_mode()
    def peer(new):
        b.peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                        min_new_tokens=new, max_new_tokens=new, pad_token_id=0)

    counts = (1, 60) if b.size == "tiny" else (1, 32, 128)
    times = turns([partial(f, n) for n in counts for f in (ours, peer)], b.repeats, b.device)
    first, *rest = ([turn[i:i + 2] for turn in times] for i in range(0, 2 * len(counts), 2))
    b.rates(f"{b.size} prefill {rows} x {length}", rows * length, first,
            rows * length * matmul_flops(b.shape, False))
    for new, whole in zip(counts[1:], rest, strict=True):
        added = [[w - f for w, f in zip(*pairs, strict=True)] for pairs in zip(whole, first, strict=True)]
        case, steps, step = f"{rows} x {length} + {new}", new - 1, medians(added)[0] / (new - 1)
        b.rates(f"{b.size} whole {case}", rows * new, whole, memory=[partial(f, new) for f in (ours, peer)])
        b.rates(f"{b.size} decode {case}", rows * steps, added, rows * steps * matmul_flops(b.shape),
                ms_per_step=1e3 * step, bandwidth_share=weights / step / b.bandwidth)

    def prefill(samples):
        sampler.generate(prompts[:4], [0, 1, 2, 3], samples, 0, 0, Sampling(max_new_tokens=1))
        return 1e3 * sampler.stats["prefill_s"]

    # 4 prompts x 8 samples pay for the prefill of 4; against our own 4 x 1
    pairs = [(prefill(8), prefill(1)) for _ in range(4 * b.repeats + 1)][1:]
    show(b.cases, f"{b.size} prefill 4 x 8 shared (peer: ours 4 x 1)", "ms", *medians(pairs))
    if b.size == "tiny":
        refill_case(b)


def refill_case(b):
    """256 responses of geometric length (8 of 512 ids end one) in 32 slots; peer: 8 batches in lock-step,
    each as long as its longest response, as in `transformers.generate`."""
    sampler, lock_step = (Sampler(b.ours, eos, 512, 32, b.dtype) for eos in (range(0, 512, 64), []))
    prompts = random_ids(256, 30, 512)

    def generate(sampler, n, *caps):
        return [len(r.tokens) for i in range(0, 256, n) for r in sampler.generate(
            prompts[i:i + n], range(i, i + n), 1, 0, 0, Sampling(max_new_tokens=caps[i // n]))]
    lengths = torch.tensor(generate(sampler, 256, 400)).view(8, 32)
    b.rates("256 ragged through 32 slots (peer: lock-step)", int(lengths.sum()), turns(
        (lambda: generate(sampler, 256, 400), lambda: generate(lock_step, 32, *lengths.amax(1).tolist())),
        b.repeats, b.device))


def bench_learner(b):
    """Responses of equal length without shared prompts, then K of ragged length (1/4 to 7/4 of the mean)."""
    mean = 40 if b.size == "tiny" else 400 if b.device.type == "cuda" else 100
    rows, k, prompt = (128, 8, 40) if b.size == "tiny" else (8, 4, 100)
    body, whole = matmul_flops(b.shape, False), matmul_flops(b.shape)
    ragged = [int(mean * (0.25 + 1.5 * i / rows)) for i in range(rows)]
    b.peer.train()
    for name, lengths, shared in (("equal, nothing shared", [mean] * rows, 1),
                                  (f"ragged, {k} responses a prompt", ragged, k)):
        prompts = random_ids(rows // shared, prompt, b.shape["vocab_size"])
        responses = [random_ids(1, n, b.shape["vocab_size"], seed=n)[0] for n in lengths]
        batch = pack(prompts, [i // shared for i in range(rows)], responses).to(b.device)
        both = (learner_pass(b.ours, batch, b.dtype),
                plain_pass(b.peer, [prompts[i // shared] + r for i, r in enumerate(responses)], prompt))
        b.rates(f"{b.size} fwd+bwd {name}", sum(lengths) + prompt * rows, turns(both, b.repeats, b.device),
                3 * (len(batch.tokens) * body + len(batch.targets) * (whole - body)), memory=both)


def learner_pass(model, batch, dtype):
    """Our forward, loss and backward of one micro-batch; fp32 master weights, autocast for 16-bit."""
    def run():
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logp, _ = model(batch)
        logp.mean().backward()
        model.zero_grad(set_to_none=True)
    return run


def plain_pass(model, sequences, prompt):
    """What a plain transformers loop does: right padding, full logits in fp32, log_softmax, gather. `prompt`:
    tokens of every sequence that belong to the prompt."""
    ids = pad_sequence([*map(torch.tensor, sequences)], batch_first=True).to(model.device)
    lengths = torch.tensor([[len(s)] for s in sequences], device=model.device)
    at = torch.arange(ids.shape[1], device=model.device)
    answer = (at[1:] >= prompt) & (at[1:] < lengths)

    def run():
        logits = model(ids, attention_mask=(at < lengths).long(), use_cache=False).logits[:, :-1].float()
        logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][answer].mean().backward()
        model.zero_grad(set_to_none=True)
    return run


def bench_step(cfg, cases):
    """One RL step (rollout, reward, reference, update) of 4 prompts x 8 short responses on the tiny model:
    GRPOTrainer's, and ours after each of them, inside its own training loop; two turns of warm-up."""
    import datasets
    import transformers
    import trl
    count, pairs, clock = 4 * cfg.repeats + 2, [], time.perf_counter
    run_cfg, device = train.resolve(train.Config("grpo", eval_data="", steps=count, prompts_per_step=4,
                                                 max_new_tokens=64, lr=1e-6, device=cfg.device))
    run = train.build(run_cfg, device)
    run.optimizer = train.make_optimizer(run.model, run_cfg)

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begun = clock()

        def on_step_end(self, *_, **__):
            middle = clock()
            train.train_step(run, len(pairs))
            pairs.append((1e3 * (clock() - middle), 1e3 * (middle - self.begun)))

    def rewards(completions, label, **_):
        return [v.reward for v in run.grader.grade([c[0]["content"] for c in completions], label)]

    options = trl.GRPOConfig(
        output_dir="out/peer", per_device_train_batch_size=32, num_generations=8, max_completion_length=64,
        beta=0.01, learning_rate=1e-6, max_steps=count, logging_strategy="no", save_strategy="no",
        report_to=[], use_cpu=device.type == "cpu", bf16=run_cfg.dtype == "bfloat16", temperature=1.0,
        disable_tqdm=True, gradient_checkpointing=False)
    asked = datasets.Dataset.from_list([
        {"prompt": [{"role": "user", "content": p.question}], "label": p.label}
        for p in map(run.problems.__getitem__, range(4 * count))])
    model = transformers.AutoModelForCausalLM.from_pretrained(str(run.folder), dtype=torch.float32)
    with run.grader:
        trl.GRPOTrainer(model, rewards, options, train_dataset=asked, processing_class=run.tokenizer,
                        callbacks=[Turns()]).train()
    show(cases, "step, tiny, 4 prompts x 8 responses", "ms", *medians(pairs[2:]))


def main(cfg):
    with cli.user_errors():
        device = distributed.pick_device(cfg.device)
        if cfg.repeats < 1:
            raise ValueError(f"--repeats {cfg.repeats}: at least 1")
    print(f"{device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    cases, by_size = [], {"sampler": bench_sampler, "learner": bench_learner}
    for size in SIZES:
        if cfg.what in by_size and cfg.only in size:
            by_size[cfg.what](Bench(size, cfg, device, cases))
    if cfg.what == "step":
        bench_step(cfg, cases)
    if cfg.json:
        about = {"what": cfg.what, "device": device.type, "torch": torch.__version__}
        Path(cfg.json).write_text(json.dumps(about | {"cases": cases}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(cli.parse(Config, __doc__))
