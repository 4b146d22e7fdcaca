#!/usr/bin/env bash
# Everything that wants a GPU, in one call: recordings on NCCL, and the rules of the nccl profile that were only read (N5 to N12),
# each put to the test. With fewer GPUs than ranks several share one, which takes NCCL 2.30 or newer.
#
#   traces/nccl.sh                 all of it; results in traces/nccl/, a table at the end
#   PYTHON=python3 OUT=/tmp/x BACKEND=gloo TIMEOUT='5 s' traces/nccl.sh     another interpreter, folder; a rehearsal without a GPU
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python} backend=${BACKEND:-nccl} out=${OUT:-traces/nccl} patience=${TIMEOUT:-30 s}
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.jsonl "$out"/*.txt "$out"/*.rule

{ "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda); print(*torch.cuda.nccl.version(), sep=".")'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; } > "$out/machine.txt" 2>&1

# run NAME RULE FILE …: the report as JSON, the trace, what else was said; a hang is ended by distsim, and by timeout(1) if that fails.
run() {
  local name=$1 rule=$2 status
  shift 2
  echo "$rule" > "$out/$name.rule"
  timeout --kill-after=10 600 "$python" -m distsim run "$@" --real --force --backend "$backend" --timeout "$patience" --format json \
    --trace "$out/$name.jsonl" > "$out/$name.json" 2> "$out/$name.txt"
  status=$?
  echo "$name: exit status $status"
}

# Recordings: one rank, then two, which share a GPU where there is only one; the file's own number of ranks.
run one_rank "" traces/collectives.yaml --set world=1 --set vars.monitored=0 --repeat 5
run collectives_2 "" traces/collectives.yaml --set world=2 --set vars.monitored=0 --repeat 5
run ring_2 "" traces/ring.yaml --set world=2 --repeat 5
run hybrid "" scenarios/hybrid.yaml --repeat 5

# The rules. Both ways of making communicators where they differ.
rules=traces/nccl_rules
for init in lazy eager; do
  run "tags_$init" "N5 tags are ignored" scenarios/tag_mismatch.yaml --set "options.init=$init"
  run "any_source_$init" "N6 no receive from any source" scenarios/findings/ds701_any_source_on_nccl.yaml --set "options.init=$init"
  run "behind_collective_$init" "N7 which communicator messages use" $rules/message_behind_collective.yaml --set "options.init=$init"
  run "first_isend_$init" "N8 first use waits on the host" $rules/first_isend.yaml --set "options.init=$init"
  run "batch_first_$init" "N8 a first batch takes the whole group" $rules/batch_first.yaml --set "options.init=$init"
  run "first_contact_$init" "N9 both send as first contact" $rules/both_send.yaml --set vars.warm=0 --set "options.init=$init"
done
for elements in 256 65536 524288 1048576 2097152 16777216; do
  run "both_send_$((elements * 4))" "N10 both send, $((elements * 4)) bytes" $rules/both_send.yaml --set "vars.elements=$elements"
done
run batch_unit "N11 a batch completes as a unit" scenarios/zoo/z13_asymmetric_batch.yaml
run groups_blocking "N12 opposite order, blocking" scenarios/zoo/z11_groups_opposite_order.yaml
run groups_crossed "N12 opposite order, async" $rules/groups_crossed.yaml
run groups_crossed_ordered "N12 the same, launch_order_implicit" $rules/groups_crossed.yaml --set options.launch_order_implicit=true

echo
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} "$python" traces/nccl_table.py "$out" | tee "$out/table.txt"
