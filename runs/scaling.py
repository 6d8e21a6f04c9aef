"""Time and peak memory of forward + backward against response length, K and model size; of the head; and a
projection to Qwen3-8B from the same formulas.

    python runs/scaling.py --json figures.json --plot docs/scaling.svg
    python runs/scaling.py --device cuda
    python runs/scaling.py --projection         # the projection alone: nothing is run

`growth` is the time per token relative to the first case of the model (32 responses of 128 tokens): 1 where
attention costs nothing; `expected` is what the count of FLOPs says, products and attention.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench  # noqa: E402
from model import ModelConfig, Qwen3, pack, token_logp  # noqa: E402

PROMPT = 100
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
SHAPES = (*((4096 // n, n, min(8, 4096 // n)) for n in LENGTHS),            # responses, their length, K
          *((count, 128, 8) for count in (8, 16, 64)), (16, 256, 2), (16, 256, 16))
MODELS = ((4, 128), (4, 256), (8, 256), (8, 512))           # layers, hidden
QWEN3_8B = dict(zip(bench.NAMES, (151936, 4096, 12288, 36, 32, 8, 128, 40960), strict=True))


@dataclasses.dataclass
class Config:
    device: str = "auto"
    repeats: int = 5            # turns per figure
    json: str = ""              # also write the cases there
    plot: str = ""              # and an SVG of time and memory against response length
    projection: bool = False    # only print the projection to Qwen3-8B
    tflops: float = 989         # of one GPU in bf16, dense (H100 SXM data sheet)
    tbytes: float = 3.35        # TB/s of its memory (the same)
    links: tuple[float, float] = (450, 50)  # GB/s of a GPU to its peers: inside a machine, between machines


def attention_flops(c, context):
    """Forward FLOPs of scores and weighted values of one token that sees `context` tokens."""
    return 4 * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"] * context


def learner_flops(c, length, k, count, prompt=PROMPT):
    """Forward FLOPs of `count` responses, a prompt run once for its `k` responses."""
    prompts, body = -(-count // k), bench.matmul_flops(c, False)
    head = bench.matmul_flops(c) - body
    return ((prompts * prompt + count * length) * body + count * length * head
            + prompts * prompt * attention_flops(c, prompt / 2)
            + count * length * attention_flops(c, prompt + length / 2))


def measure(cfg, device, cases):
    for layers, hidden in MODELS:
        shape = bench.SIZES["tiny"] | {
            "max_position_embeddings": 8192, "num_hidden_layers": layers, "hidden_size": hidden,
            "intermediate_size": 3 * hidden, "num_attention_heads": hidden // 32,
            "num_key_value_heads": hidden // 64}
        model = Qwen3(ModelConfig.from_dict(shape | {
            "model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-6})
        ).init_weights(0).to(device)
        first = None
        for count, length, k in SHAPES:
            batch = pack(bench.random_ids(-(-count // k), PROMPT, 512), [i // k for i in range(count)],
                         bench.random_ids(count, length, 512)).to(device)
            run = bench.learner_pass(model, batch, torch.float32)
            seconds, *_ = bench.medians(bench.turns((run, run), cfg.repeats, device))
            micro = 1e6 * seconds / len(batch.tokens)
            flops = learner_flops(shape, length, k, count) / len(batch.tokens)
            first = first or (micro, flops)
            bench.show(cases, f"{layers} x {hidden}: {count} x {length}, K {k}", "tok/s",
                       count * length / seconds, us_per_token=micro, growth=micro / first[0],
                       expected=flops / first[1], mib=bench.peak_mib(device, run))


def head(device, cases, count=4096, vocab=151936):
    """Extra memory of the chunked log-probs and of the gradient of the hidden states; peer: fp32 logits."""
    h = torch.randn(count, 1024, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, 1024, device=device, dtype=torch.bfloat16) * 0.02
    targets = torch.randint(0, vocab, (count,), device=device)
    extra = bench.peak_mib(device, lambda: token_logp(h, weight, targets)[0].sum().backward())
    bench.show(cases, f"head {count:,} x {vocab:,}, extra (peer: logits)",
               "MiB", extra, count * vocab / 2 ** 18)


def plot(cases, path):
    """Time per token (measured: line; by FLOPs: dashes) and peak memory, against response length."""
    import matplotlib
    from matplotlib.figure import Figure
    with matplotlib.rc_context({"svg.hashsalt": "nanorpp", "font.size": 10}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        time, memory = figure.subplots(1, 2)
        for color, (layers, hidden) in zip(("C0", "C1", "C2", "C3"), MODELS, strict=True):
            name = f"{layers} x {hidden}"
            rows = [c for c in cases if c["name"].startswith(f"{name}:")][:len(LENGTHS)]
            label = f"{layers} layers, width {hidden}"
            time.plot(LENGTHS, [c["growth"] for c in rows], "o-", color=color, label=label)
            time.plot(LENGTHS, [c["expected"] for c in rows], "--", color=color, alpha=0.6)
            memory.plot(LENGTHS, [c["mib"] for c in rows], "o-", color=color, label=label)
        time.set(xlabel="response length (tokens); dashed: by FLOPs", ylabel="time per token / that at 128",
                 xscale="log")
        memory.set(xlabel="response length (tokens)", ylabel="peak memory of a pass (MiB)", xscale="log")
        for axes in (time, memory):
            axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        time.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def project(cfg, length=1024, responses=32, k=8, share=0.4):
    """Qwen3-8B on 8 and 64 GPUs, `responses` a GPU, as the loop here would do it (DDP, --zero, fp32 masters,
    a bf16 reference and sampler copy). `share`: of the data sheet's rates that products and decoding reach.
    Prints a table; nothing in it is measured."""
    c = QWEN3_8B
    parameters = bench.matmul_flops(c) / 2 + c["vocab_size"] * c["hidden_size"]         # untied
    cache = 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * (PROMPT + length)
    act = (64 * c["hidden_size"] + 8 * c["intermediate_size"]) * c["num_hidden_layers"] * 4096
    kept = 2 * c["hidden_size"] * c["num_hidden_layers"] * 4096                         # with checkpointing
    learn = learner_flops(c, length, k, responses) / (cfg.tflops * 1e12 * share)        # one forward
    decode = length * (2 * parameters + responses * cache / 2) / (cfg.tbytes * 1e12 * share)
    print(f"projection, not measured: {parameters / 1e9:.2f} B parameters, {responses} responses of {length} "
          f"tokens a GPU, {share:.0%} of {cfg.tflops:.0f} TFLOP/s and {cfg.tbytes} TB/s\n"
          "| GPUs | rollout s | reference s | forward, backward s | all-reduce s | step s | GiB a GPU "
          "| with --offload-ref, --activation-checkpointing |\n|---|---|---|---|---|---|---|---|")
    for gpus in (8, 64):
        reduce = 2 * (gpus - 1) / gpus * 4 * parameters / (1e9 * cfg.links[gpus > 8])
        held = (4 + 4 + 4 + 8 / gpus + 2 + 2) * parameters     # weights, gradients, buckets, Adam, 2 copies
        most, least = held + act + responses * cache, held - 2 * parameters + kept + responses * cache
        print(f"| {gpus} | {decode:.1f} | {learn:.1f} | {3 * learn:.1f} | {reduce:.1f} | "
              f"{decode + 4 * learn + reduce:.1f} | {most / 2 ** 30:.0f} | {least / 2 ** 30:.0f} |")


def main(cfg):
    project(cfg)
    if cfg.projection:
        return
    cases, device = [], bench.distributed.pick_device(cfg.device)
    measure(cfg, device, cases)
    head(device, cases)
    if cfg.plot:
        plot(cases, cfg.plot)
    if cfg.json:
        about = {"what": "scaling", "device": device.type, "torch": torch.__version__}
        Path(cfg.json).write_text(json.dumps(about | {"cases": cases}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(bench.cli.parse(Config, __doc__))
