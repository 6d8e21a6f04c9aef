"""A folder with Qwen3's real geometry and tokenizer and random weights, to exercise the whole path without a download.

    python runs/random_qwen3.py SOURCE OUT     # SOURCE holds config.json, generation_config.json and the tokenizer
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cli  # noqa: E402
from model import ModelConfig, Qwen3, save_model  # noqa: E402

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, out = sys.argv[1:]
    with cli.user_errors():
        save_model(Qwen3(ModelConfig.from_folder(source)).init_weights(seed=0).bfloat16(), out, source)
    print(f"random weights of {source}'s geometry in {out}")
