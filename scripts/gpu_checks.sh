#!/usr/bin/env bash
# Run the checks that need a GPU: tests, three benchmarks, then experiment=resnet32_tuned, within LIMIT_S seconds.
#
#   OUT=FOLDER CIFAR10=FOLDER [WHEELS=FOLDER] [BEFORE=FILE] [LIMIT_S=720] scripts/gpu_checks.sh
#
# OUT: the output folder for logs, records and runs.tgz.
# CIFAR10: the folder cifar-10-batches-py.
# WHEELS: packages that the machine lacks (pip wheel -w WHEELS hydra-core optuna submitit timm ...).
# BEFORE: the runs.tgz of the previous call, whose trials are not repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?folder for the results}" "${CIFAR10:?folder of CIFAR-10}"
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=1 PYTHONPATH=$PWD
end=$(($(date +%s) + ${LIMIT_S:-720})) runs=$PWD/runs/gpu reserve_s=20
mkdir -p "$OUT" "$runs"
left() { echo $((end - $(date +%s) - reserve_s)); }

step() { # NAME COMMAND...: run the command if time is left, and log its output
    local name=$1 left_s=$(left)
    shift
    echo "== $name: $left_s s left"
    [ "$left_s" -gt 0 ] || return 0
    timeout --signal=INT --kill-after=15 "$left_s" "$@" >"$OUT/$name.log" 2>&1 || echo "   ended with $?"
    tail -n 3 "$OUT/$name.log"
}

save() { # keep summaries and metrics, but not checkpoints and weights
    cp benchmarks/gpu/*.json "$OUT" 2>/dev/null || true
    (cd "$runs" && find . -name '*.json' -o -name '*.jsonl' -o -name config.yaml | tar czf "$OUT/runs.tgz" -T -)
}
trap save EXIT
[ -z "${BEFORE:-}" ] || tar xzf "$BEFORE" -C "$runs"
[ -z "${WHEELS:-}" ] || step wheels python3 -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
if [ -z "${BEFORE:-}" ]; then
    step tests python3 -m pytest -q -m gpu -p no:cacheprovider
    for name in adascale_step_time ghost_batch_norm resident_rate; do
        step "$name" python3 -m "benchmarks.$name"
    done
fi
nvidia-cuda-mps-control -d 2>/dev/null || true # lets 15 processes share the GPU
tuned=$runs/resnet32_tuned
step tuned python3 -m adaecho.run -m experiment=resnet32_tuned "data.path=$CIFAR10" "hydra.sweep.dir=$tuned"
# Second stage: repeat the cheapest trial of each arm that reached the target with three new seeds.
arms=$(python3 - "$tuned" 2>/dev/null <<'PYTHON'
import sys
from pathlib import Path
from adaecho.records.status import FINISHED
from adaecho.records.trials import read_rows
rows = [row for row in read_rows(Path(sys.argv[1]) / "trials.json") if row["status"] in FINISHED]
reached = sorted((row["to_target_fresh_examples"], number) for number, row in enumerate(rows)
                 if row["to_target_fresh_examples"])
best = {rows[number]["arm"]: rows[number] for _, number in reversed(reached)}
print(len(rows) >= 24 and len(best) == 3 and "{" + ",".join(
    f'{arm}:["echo={row["echo_variant"]}","echo.factor={row["echo_factor"]}","max_steps=14000",'
    + ",".join(f'"{key}={value}"' for key, value in row["hyperparameters"].items()) + "]"
    for arm, row in best.items()) + "}")
PYTHON
) || arms=False
[ "$arms" != False ] || exit 0 # trials are missing, or an arm missed the target
step seeds python3 -m adaecho.run -m experiment=resnet32_tuned "data.path=$CIFAR10" search.seed=83 \
    search.trials=1 search.repeats=3 "search.arms=$arms" "hydra.sweep.dir=$runs/resnet32_tuned_seeds"
