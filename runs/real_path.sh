#!/usr/bin/env bash
# The real path without a download: Qwen3-0.6B's geometry with random weights, its real tokenizer, real GSM8K parquet;
# two whole updates of 4 x 8 responses for each algorithm, thinking on and off, on whatever device there is.
#
#   runs/real_path.sh SOURCE GSM8K [OUT]     # SOURCE: config.json + tokenizer of Qwen3-0.6B; GSM8K: folder with parquet
set -euo pipefail
cd "$(dirname "$0")/.."
SOURCE=${1:?usage: runs/real_path.sh SOURCE GSM8K [OUT]} GSM8K=${2:?usage: runs/real_path.sh SOURCE GSM8K [OUT]}
OUT=${3:-out/real_path} PYTHON=${PYTHON:-python3}

mkdir -p "$OUT"
[ -e "$OUT/model" ] || "$PYTHON" runs/random_qwen3.py "$SOURCE" "$OUT/model"
for algo in grpo reinforce_pp reinforce_pp_baseline; do
    for thinking in "" --no-thinking; do
        "$PYTHON" train.py --algo "$algo" $thinking --model "$OUT/model" --train-data "$GSM8K" --eval-data '' \
            --out "$OUT/$algo$thinking" --steps 2 --prompts-per-step 4 --samples-per-prompt 8 --max-new-tokens "${CAP:-8}" \
            --lr 1e-6 --slots 32 --dtype bfloat16 --save-every -1
    done
done
