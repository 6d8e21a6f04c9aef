"""Speed, measured beside the peers in the same process, in turns: the sampler, the learner, a whole step.

    python bench.py sampler   # against transformers.generate: prefill, decode, shared prompts, refill
    python bench.py learner              # against a plain transformers forward and backward with full logits
    python bench.py step                 # a whole RL step against TRL's GRPOTrainer (pip install trl)
    python bench.py scaling              # time and memory against response length, K and model size
    python bench.py sampler --device cuda --json figures.json

Every figure is the median of `--repeats` turns, ours and the peer's alternating after one warm-up of each;
`ratio` is the median of the pairwise ratios (above 1: ours is faster). Random weights, real geometries, no
download. Shares are of the matrix-product rate and memory bandwidth measured on this machine just before.
"""

import contextlib
import dataclasses
import gc
import json
import os
import statistics
import time
from typing import Literal

import torch

import cli
import distributed
from model import ModelConfig, Qwen3, pack
from sample import Sampler, Sampling

NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")
SIZES = {"tiny": dict(zip(NAMES, (512, 128, 384, 4, 4, 2, 32, 512), strict=True)),
         "0.6B": dict(zip(NAMES, (151936, 1024, 3072, 28, 16, 8, 128, 40960), strict=True))}

@dataclasses.dataclass
class Config:
    what: Literal["sampler", "learner", "step", "scaling"]
    device: str = "auto"
    repeats: int = 5                        # turns per figure (the 0.6B cases on a CPU take half)
    only: Literal["", "tiny", "0.6B"] = ""  # one of the two models
    json: str = ""                          # also write the cases there: name, ours, peer, ratio, ...

# ------------------------------------------------------------------------------------------------- measuring
def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize()

def turns(ours, peer, repeats, device):
    """Alternating calls of two functions that return nothing or seconds -> (median ours, median peer,
    ratio)."""
    def timed(f):
        gc.collect()
        sync(device)
        start = time.perf_counter()
        f()
        sync(device)
        return time.perf_counter() - start
    timed(ours), timed(peer)
    pairs = [(timed(ours), timed(peer)) for _ in range(repeats)]
    a, b = zip(*pairs, strict=True)
    return statistics.median(a), statistics.median(b), statistics.median(y / x for x, y in pairs)

def limits(device, dtype):
    """(matrix-product FLOP/s at 1,024^3, copy bytes/s) of this machine now."""
    a, b = (torch.randn(1024, 1024, device=device).to(dtype) for _ in range(2))
    big = torch.empty(2 ** 26, dtype=torch.float32, device=device)
    other = torch.empty_like(big)
    product, _, _ = turns(lambda: a @ b, lambda: a @ b, 20, device)
    copied, _, _ = turns(lambda: other.copy_(big), lambda: other.copy_(big), 5, device)
    return 2 * 1024 ** 3 / product, 2 * big.numel() * 4 / copied

def peak_bytes(device, f):
    """Peak memory of f beyond what was there: allocator peak on CUDA, growth of the process' peak
    elsewhere."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated() - before
    import resource
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")             # forget the old peak (Linux)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    f()
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return peak * 1024 - before

def show(cases, name, unit, ours, peer=None, ratio=None, **more):
    cases.append({"name": name, "unit": unit, "ours": ours, "peer": peer, "ratio": ratio, **more})
    text = "   ".join(f"{k} {v:.3g}" for k, v in more.items())
    print(f"{name:<44} {ours:>10.4g}" + (f" {peer:>10.4g}" if peer else " " * 11) + f" {unit:<9}"
          + (f" ratio {ratio:>6.2f}" if ratio else "") + ("   " + text if text else ""), flush=True)

def make(size, device, dtype):
    """(ours, the same weights in transformers), random."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    options = dict(SIZES[size], tie_word_embeddings=True, rms_norm_eps=1e-6, attention_bias=False)
    hf_config = Qwen3Config(**options, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    ours = Qwen3(ModelConfig.from_dict({**options, "model_type": "qwen3", "rope_theta": 1e6})).init_weights(0)
    ours.to(device)
    with torch.device("meta"):
        peer = Qwen3ForCausalLM(hf_config)
    peer = peer.to_empty(device=device).to(dtype).eval()
    peer.load_state_dict({k: v.to(dtype) for k, v in ours.state_dict().items()}, strict=False)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(hf_config).to(device)   # not loaded: no parameter
    peer.tie_weights()
    peer.generation_config.eos_token_id = None
    return ours, peer

def matmul_flops(c, with_head=True):
    """Forward FLOPs of the matrix products per token (attention scores not counted)."""
    layer = c["hidden_size"] * (c["head_dim"] * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
                                + 3 * c["intermediate_size"])
    return 2 * (c["num_hidden_layers"] * layer + with_head * c["vocab_size"] * c["hidden_size"])

# --------------------------------------------------------------------------------------------------- sampler
def prompts_of(count, length, vocab, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, length), generator=generator).tolist()

def bench_sampler(cfg, device, cases):
    for size, dtype, rows, length, news in (("tiny", torch.float32, 32, 30, (60,)),
                                            ("0.6B", torch.bfloat16, 32, 100, (32, 128))):
        if cfg.only not in size:
            continue
        ours, peer = make(size, device, dtype)
        sampler = Sampler(ours, [], SIZES[size]["vocab_size"], rows, dtype)
        repeats = cfg.repeats if size == "tiny" or device.type == "cuda" else max(1, cfg.repeats // 2)
        flops, bandwidth = limits(device, dtype)
        print(f"{size} {dtype}: matrix products {flops / 1e9:.0f} GFLOP/s, memory {bandwidth / 1e9:.0f} GB/s")
        for new in news:
            decode_cases(cases, size, sampler, peer, rows, length, new, repeats, device, flops, bandwidth)
        shared_case(cases, size, sampler, length, repeats, device)
        if size == "tiny":
            refill_case(cases, ours, dtype, repeats, device)

def decode_cases(cases, size, sampler, peer, rows, length, new, repeats, device, flops, bandwidth):
    """Prefill (one new token), the whole, and decode: what the other tokens add."""
    vocab = SIZES[size]["vocab_size"]
    prompts, names = prompts_of(rows, length, vocab), list(range(rows))
    ids = torch.tensor(prompts, device=device)

    def run(count):
        sampler.generate(prompts, names, 1, 0, 0, Sampling(max_new_tokens=count))
        return sampler.stats["decode_s"]

    def generate(count):
        with torch.inference_mode():
            peer.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                          min_new_tokens=count, max_new_tokens=count, pad_token_id=0)

    a, first, ratio = turns(lambda: run(1), lambda: generate(1), repeats, device)
    show(cases, f"{size} prefill {rows} x {length}", "tok/s", rows * length / a, rows * length / first, ratio,
         matmul_share=rows * length * matmul_flops(SIZES[size], False) / a / flops)
    decode = []
    whole = [lambda: decode.append(run(new)), lambda: generate(new)]
    a, b, ratio = turns(*whole, repeats, device)
    show(cases, f"{size} whole {rows} x {length} + {new}", "tok/s", rows * new / a, rows * new / b, ratio,
         ours_mib=peak_bytes(device, whole[0]) / 2 ** 20, peer_mib=peak_bytes(device, whole[1]) / 2 ** 20)
    a, b = statistics.median(decode[1:]), b - first
    weights = sum(p.numel() for p in sampler.model.parameters()) * torch.finfo(sampler.dtype).bits / 8
    show(cases, f"{size} decode {rows} x {length} + {new}", "tok/s", rows * new / a, rows * new / b, b / a,
         ms_per_step=1e3 * a / new, bandwidth_share=weights * new / a / bandwidth,
         matmul_share=rows * new * matmul_flops(SIZES[size]) / a / flops)

def shared_case(cases, size, sampler, length, repeats, device):
    """4 prompts x 8 samples pay for the prefill of 4 (the peer repeats the prompt); against our own 4 x 1."""
    prompts = prompts_of(4, length, SIZES[size]["vocab_size"], seed=2)

    def prefill(samples):
        sampler.generate(prompts, [0, 1, 2, 3], samples, 0, 0, Sampling(max_new_tokens=1))

    ours, single, ratio = turns(lambda: prefill(8), lambda: prefill(1), 2 * repeats, device)
    show(cases, f"{size} prefill 4 x 8 shared (peer: ours 4 x 1)", "ms", 1e3 * ours, 1e3 * single, ratio)

def refill_case(cases, model, dtype, repeats, device):
    """256 requests of geometric length (8 ids of 512 end a response) through 32 slots, against 8 lock-step
    batches."""
    sampler = Sampler(model, range(0, 512, 64), 512, 32, dtype)
    prompts, options = prompts_of(256, 30, 512, seed=3), Sampling(max_new_tokens=400)
    count = []

    def refilled():
        count[:] = [sum(len(r.tokens) for r in sampler.generate(prompts, list(range(256)), 1, 0, 0, options))]

    def lock_step():
        for first in range(0, 256, 32):
            sampler.generate(prompts[first:first + 32], list(range(first, first + 32)), 1, 0, 0, options)

    ours, theirs, ratio = turns(refilled, lock_step, repeats, device)
    show(cases, "256 ragged through 32 slots (peer: lock-step)", "tok/s", count[0] / ours, count[0] / theirs,
         ratio)

# --------------------------------------------------------------------------------------------------- learner
def ragged(rows, mean, seed=4):
    """Response lengths between mean / 4 and about 2 mean, like those of a math data set."""
    generator = torch.Generator().manual_seed(seed)
    return (mean * (0.25 + 1.5 * torch.rand(rows, generator=generator))).int().tolist()

def bench_learner(cfg, device, cases):
    on_gpu = device.type == "cuda"
    for size, dtype, groups, k, prompt, mean in (("tiny", torch.float32, 16, 8, 40, 40),
                                                 ("0.6B", torch.bfloat16, 2, 4, 100, 400 if on_gpu else 100)):
        if cfg.only not in size:
            continue
        ours, peer = make(size, device, dtype)
        peer.train()
        repeats = cfg.repeats if size == "tiny" or on_gpu else max(1, cfg.repeats // 2)
        flops, _ = limits(device, dtype)
        vocab, body = SIZES[size]["vocab_size"], matmul_flops(SIZES[size], False)
        head = matmul_flops(SIZES[size]) - body
        print(f"{size}: {dtype}, matrix products {flops / 1e9:.0f} GFLOP/s")
        for shape, lengths, shared in (("equal, nothing shared", [mean] * (groups * k), False),
                                       (f"ragged, {k} responses a prompt", ragged(groups * k, mean), True)):
            prompts = prompts_of(groups if shared else groups * k, prompt, vocab)
            responses = [prompts_of(1, n, vocab, seed=n)[0] for n in lengths]
            owner = [i // k if shared else i for i in range(groups * k)]
            batch = pack(prompts, owner, responses).to(device)
            run = learner_pass(ours, batch, dtype, device)
            plain = plain_pass(peer, [prompts[p] + r for p, r in zip(owner, responses, strict=True)],
                               [prompt] * len(responses), device)
            a, b, ratio = turns(run, plain, repeats, device)
            tokens = sum(lengths) + prompt * groups * k
            work = 3 * (len(batch.tokens) * body + len(batch.targets) * head)
            show(cases, f"{size} fwd+bwd {shape}", "tok/s", tokens / a, tokens / b, ratio,
                 matmul_share=work / a / flops,
                 ours_mib=peak_bytes(device, run) / 2 ** 20, peer_mib=peak_bytes(device, plain) / 2 ** 20)
    head_memory(cases, device)

def learner_pass(model, batch, dtype, device):
    """Our forward, loss and backward of one micro-batch; fp32 master weights, autocast for 16-bit."""
    def run():
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logp, _ = model(batch)
        logp.mean().backward()
        model.zero_grad(set_to_none=True)
    return run

def plain_pass(model, sequences, prompt_lens, device):
    """What a plain transformers loop does: right padding, full logits in fp32, log_softmax, gather."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask, answer = torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
    for i, (sequence, start) in enumerate(zip(sequences, prompt_lens, strict=True)):
        ids[i, :len(sequence)] = torch.tensor(sequence)
        mask[i, :len(sequence)], answer[i, start:len(sequence)] = 1, True
    ids, mask, answer = ids.to(device), mask.to(device), answer.to(device)

    def run():
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        logp[answer[:, 1:]].mean().backward()
        model.zero_grad(set_to_none=True)
    return run

def head_memory(cases, device):
    """Extra memory of the chunked log-probs of 4,096 tokens x 151,936 ids, value and gradient of the hidden
    states."""
    from model import token_logp
    hidden = torch.randn(4096, 1024, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(151936, 1024, device=device) * 0.02).bfloat16()
    targets = torch.randint(0, 151936, (4096,), device=device)
    extra = peak_bytes(device, lambda: token_logp(hidden, weight, targets)[0].sum().backward())
    show(cases, "head, 4,096 x 151,936, extra (peer: logits)", "MiB", extra / 2 ** 20, 4096 * 151936 / 2 ** 18)

# ------------------------------------------------------------------------------------------------- whole step
def bench_step(cfg, device, cases):
    """One RL step (rollout, reward, reference, update) of 4 prompts x 8 short responses on the tiny model:
    ours, and GRPOTrainer's, alternating inside its own training loop."""
    import train
    run_cfg, device = train.resolve(train.Config(
        algo="grpo", prompts_per_step=4, samples_per_prompt=8, max_new_tokens=64, lr=1e-6,
        steps=4 * cfg.repeats + 4, eval_data="", device=cfg.device))
    run = train.build(run_cfg, device)
    with run.grader:
        run.optimizer = train.make_optimizer(run.model, run_cfg)
        ours, theirs = peer_steps(run, train.train_step, 4 * cfg.repeats)
    a, b = statistics.median(ours), statistics.median(theirs)
    show(cases, "step, tiny, 4 prompts x 8 responses", "ms", 1e3 * a, 1e3 * b,
         statistics.median(y / x for x, y in zip(ours, theirs, strict=True)))

def peer_steps(run, step_of_ours, count):
    """Runs GRPOTrainer for `count` steps; after each of its steps one of ours is timed -> (ours, theirs) in
    s."""
    import datasets
    import transformers
    import trl
    ours, theirs, start = [], [], [0.0]

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            start[0] = time.perf_counter()

        def on_step_end(self, *_, **__):
            theirs.append(time.perf_counter() - start[0])
            begun = time.perf_counter()
            step_of_ours(run, len(ours))
            ours.append(time.perf_counter() - begun)

    def rewards(completions, label, **_):
        texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        return [v.reward for v in run.grader.grade(texts, label)]

    rows = [{"prompt": [{"role": "user", "content": p.question}], "label": p.label}
            for p in (run.problems[i] for i in range(4 * count + 8))]
    options = trl.GRPOConfig(
        output_dir="out/peer", per_device_train_batch_size=32, num_generations=8, max_completion_length=64,
        beta=0.01, learning_rate=1e-6, max_steps=count + 2, logging_strategy="no", save_strategy="no",
        report_to=[], use_cpu=run.device.type == "cpu", bf16=run.cfg.dtype == "bfloat16", temperature=1.0,
        disable_tqdm=True, gradient_checkpointing=False)
    folder = str(run.folder)
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), args=options,
        reward_funcs=rewards, train_dataset=datasets.Dataset.from_list(rows), processing_class=run.tokenizer,
        callbacks=[Turns()])
    trainer.train()
    return ours[2:], theirs[2:]         # two turns of warm-up

# ---------------------------------------------------------------------------------------------------- scaling
def bench_scaling(cfg, device, cases):
    """Seconds and peak memory of forward + backward against response length, K and width; tokens held at
    4,096."""
    base = dict(SIZES["tiny"], max_position_embeddings=8192)
    for layers, hidden in ((4, 128), (4, 256), (8, 256)):
        options = dict(base, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=3 * hidden,
                       num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64)
        raw = dict(options, model_type="qwen3", rope_theta=1e6, tie_word_embeddings=True, rms_norm_eps=1e-6)
        model = Qwen3(ModelConfig.from_dict(raw)).init_weights(0).to(device)
        for length, k in ((128, 8), (256, 8), (512, 8), (1024, 8), (2048, 2), (4096, 1), (256, 2), (256, 16)):
            count = max(1, 4096 // length)
            prompts = prompts_of(-(-count // k), 100, 512)
            batch = pack(prompts, [i // k for i in range(count)], prompts_of(count, length, 512)).to(device)
            run = learner_pass(model, batch, torch.float32, device)
            seconds, _, _ = turns(run, run, cfg.repeats, device)
            show(cases, f"{layers} x {hidden}: {count} x {length}, K {k}", "tok/s", count * length / seconds,
                 us_per_token=1e6 * seconds / len(batch.tokens), mib=peak_bytes(device, run) / 2 ** 20)

def main(cfg):
    with cli.user_errors():
        device = distributed.pick_device(cfg.device)
        if cfg.repeats < 1:
            raise ValueError(f"--repeats {cfg.repeats}: at least 1")
    print(f"{device.type}, {torch.get_num_threads()} of {os.cpu_count()} cores, torch {torch.__version__}")
    cases = []
    {"sampler": bench_sampler, "learner": bench_learner, "step": bench_step,
     "scaling": bench_scaling}[cfg.what](cfg, device, cases)
    if cfg.json:
        with open(cfg.json, "w", encoding="utf-8") as file:
            about = {"what": cfg.what, "device": device.type, "torch": torch.__version__}
            json.dump(about | {"cases": cases}, file, indent=2)

if __name__ == "__main__":
    main(cli.parse(Config, __doc__))
