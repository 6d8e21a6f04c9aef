"""Time and peak memory of forward + backward (4,096 tokens) against response length, K, width; of the head.

    python runs/scaling.py --device cuda --json figures.json
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench  # noqa: E402
from model import ModelConfig, Qwen3, pack, token_logp  # noqa: E402

SHAPES = ((128, 8), (256, 8), (512, 8), (1024, 8), (2048, 2), (4096, 1), (256, 2), (256, 16))   # length, K


@dataclasses.dataclass
class Config:
    device: str = "auto"
    repeats: int = 5    # turns per figure
    json: str = ""      # also write the cases there


def head(device, cases, count, vocab=151936):
    """Extra memory of the chunked log-probs and of the gradient of the hidden states; peer: fp32 logits."""
    dtype = bench.distributed.compute_dtype("auto", device)
    h = torch.randn(count, 1024, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, 1024, device=device, dtype=dtype) * 0.02
    targets = torch.randint(0, vocab, (count,), device=device)
    extra = bench.peak_mib(device, lambda: token_logp(h, weight, targets)[0].sum().backward())
    bench.show(cases, f"head {count:,} x {vocab:,}, extra (peer: logits)",
               "MiB", extra, count * vocab / 2 ** 18)


if __name__ == "__main__":
    cfg, cases = bench.cli.parse(Config, __doc__), []
    device = bench.distributed.pick_device(cfg.device)
    for layers, hidden in ((4, 128), (4, 256), (8, 256)):
        model = Qwen3(ModelConfig.from_dict(bench.SIZES["tiny"] | {
            "model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 8192, "num_hidden_layers": layers, "hidden_size": hidden,
            "intermediate_size": 3 * hidden, "num_attention_heads": hidden // 32,
            "num_key_value_heads": hidden // 64})).init_weights(0).to(device)
        for length, k in SHAPES:
            count = 4096 // length
            batch = pack(bench.random_ids(-(-count // k), 100, 512), [i // k for i in range(count)],
                         bench.random_ids(count, length, 512)).to(device)
            run = bench.learner_pass(model, batch, torch.float32)
            seconds, _, _ = bench.turns(run, run, cfg.repeats, device)
            bench.show(cases, f"{layers} x {hidden}: {count} x {length}, K {k}", "tok/s",
                       count * length / seconds, us_per_token=1e6 * seconds / len(batch.tokens),
                       mib=bench.peak_mib(device, run))
    head(device, cases, 4096 if device.type == "cuda" else 256)
    if cfg.json:
        about = {"what": "scaling", "device": device.type, "torch": torch.__version__}
        Path(cfg.json).write_text(json.dumps(about | {"cases": cases}, indent=2), encoding="utf-8")
