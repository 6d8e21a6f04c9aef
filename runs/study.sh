#!/usr/bin/env bash
# The study: three algorithms x three seeds with equal budgets and a shared prompt order, then the report.
#
#   runs/study.sh out/study                                              # the tiny model, within 20 minutes on two cores
#   MODEL=Qwen/Qwen3-0.6B DATA=openai/gsm8k runs/study.sh out/qwen       # the frozen Qwen3-0.6B workload, nine times
#   ALGOS="grpo reinforce_pp" SEEDS="1 2 3 4 5" runs/study.sh out/more --steps 100
#
# Run again to go on: complete runs are skipped, interrupted ones resumed. What fails is listed in the report as
# rejected, with the reason. Every command that ran is in OUT/commands.txt. The initial model, evaluated by each run
# before its first step, is the control.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:?usage: runs/study.sh OUT [train.py options ...]}
shift
PYTHON=${PYTHON:-python3}

mkdir -p "$OUT"
for seed in ${SEEDS:-42 1234 2026}; do
    for algo in ${ALGOS:-grpo reinforce_pp reinforce_pp_baseline}; do
        run=$OUT/$algo-seed$seed
        if [ -d "$run" ] && "$PYTHON" report.py check "$run" > /dev/null 2>&1; then
            echo "$run: complete, skipped"
            continue
        fi
        if [ -n "${MODEL:-}" ]; then
            command=(runs/qwen3_0.6b_gsm8k.sh "$algo" "$seed" "$MODEL" "$DATA" "$run" --resume --save-every 10 --keep 1 "$@")
        else
            command=("$PYTHON" train.py --algo "$algo" --seed "$seed" --out "$run" --resume "$@")
        fi
        echo "${command[*]}" | tee -a "$OUT/commands.txt"
        "${command[@]}" > "$OUT/$algo-seed$seed.log" 2>&1 || echo "$run: exit status $?, see $OUT/$algo-seed$seed.log"
        tail -n 3 "$OUT/$algo-seed$seed.log"
    done
done
"$PYTHON" report.py "$OUT" --out "$OUT/report"
