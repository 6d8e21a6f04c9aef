#!/usr/bin/env bash
# Qwen3-0.6B on GSM8K: a published workload, every value spelled out (--eps 1e-8 is its value, not the default here).
#
#   runs/qwen3_0.6b_gsm8k.sh [ALGO] [SEED] [MODEL] [DATA] [OUT] [more train.py options ...]
#   ADVANTAGE_ESTIMATOR=grpo SEED=42 MODEL_PATH=... PROMPT_DATA=... OUTPUT_DIR=... runs/qwen3_0.6b_gsm8k.sh
#
# Arguments win over environment names. PROCESSES=8 starts one process per GPU (default 1); NODES, HOST for several
# machines. EVAL_DATA names the test rows (default: the test split next to the training data; '' for none).
set -euo pipefail
cd "$(dirname "$0")/.."

ALGO=${1:-${ADVANTAGE_ESTIMATOR:-reinforce_pp_baseline}}
SEED=${2:-${SEED:-42}}
MODEL=${3:-${MODEL_PATH:-Qwen/Qwen3-0.6B}}
DATA=${4:-${PROMPT_DATA:-openai/gsm8k}}
OUT=${5:-${OUTPUT_DIR:-out/qwen3_0.6b-$ALGO-seed$SEED}}
if [ -f "$DATA" ]; then EVAL_DATA=${EVAL_DATA-}; else EVAL_DATA=${EVAL_DATA-$DATA}; fi

PROMPTS=${ROLLOUT_BATCH_SIZE:-4}
SAMPLES=${N_SAMPLES_PER_PROMPT:-8}
BATCH=${GLOBAL_BATCH_SIZE:-$((PROMPTS * SAMPLES))}
if [ $((PROMPTS * SAMPLES % BATCH)) -ne 0 ]; then
    echo "GLOBAL_BATCH_SIZE=$BATCH does not divide ROLLOUT_BATCH_SIZE x N_SAMPLES_PER_PROMPT = $((PROMPTS * SAMPLES))" >&2
    exit 2
fi

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # or a restart may meet the addresses of the dead (torch #135712)
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${PROCESSES:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "${HOST:-localhost:0}" --max-restarts "${MAX_RESTARTS:-0}" \
    train.py --algo "$ALGO" --seed "$SEED" --data-seed 42 \
    --model "$MODEL" --train-data "$DATA" --eval-data "$EVAL_DATA" --out "$OUT" \
    --steps "${NUM_ROLLOUT:-50}" --prompts-per-step "$PROMPTS" --samples-per-prompt "$SAMPLES" \
    --updates-per-rollout $((PROMPTS * SAMPLES / BATCH)) --epochs 1 \
    --max-new-tokens "${ROLLOUT_MAX_RESPONSE_LEN:-1024}" --max-tokens-per-device "${MAX_TOKENS_PER_GPU:-4096}" \
    --temperature 1.0 --kl-coef 0.01 --clip 0.2 \
    --lr 1e-6 --beta1 0.9 --beta2 0.98 --eps 1e-8 --weight-decay 0.1 --grad-clip 1.0 \
    --reward math --reward-workers "${REWARD_NUM_WORKERS:-4}" --reward-concurrency "${REWARD_MAX_CONCURRENCY:-16}" \
    --eval-rows 256 --eval-samples 4 --eval-seed 29 "${@:6}"
