#!/usr/bin/env bash
# Records the traces of this folder anew, from the project's folder. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
run() { "${PYTHON:-python}" -m distsim run "$@"; }

run scenarios/hybrid.yaml --real --backend gloo --repeat 5 --trace traces/hybrid_gloo_4.jsonl
run traces/ring.yaml --real --repeat 5 --trace traces/ring_gloo_4.jsonl
for ranks in 2 4 8; do
  run traces/collectives.yaml --real --set "world=$ranks" --repeat 5 --trace "traces/collectives_gloo_$ranks.jsonl"
done
