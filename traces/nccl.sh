#!/usr/bin/env bash
# Everything that wants a GPU, in one call, from the project's folder: recordings on NCCL, and the rules of the nccl profile that
# were only read, put to the test. With fewer GPUs than ranks, several share one (NCCL 2.30 or newer).
# What a run comes to, and whether it ended as simulated, stands in traces/nccl/NAME.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p traces/nccl
run() {
  local name=$1
  shift
  "${PYTHON:-python}" -m distsim run "$@" --real --backend nccl --trace "traces/nccl/$name.jsonl" > "traces/nccl/$name.txt" 2>&1
  echo "$name: exit status $?; $(head -n 1 "traces/nccl/$name.txt")"
}

run one traces/collectives.yaml --set world=1 --repeat 5
run collectives traces/collectives.yaml --set world=2 --repeat 5
run ring traces/ring.yaml --set world=2 --repeat 5
run hybrid scenarios/hybrid.yaml --repeat 5

# N9, N10: both send first, small and above NCCL's buffers.
run sends_small scenarios/head_to_head_sends.yaml --force --timeout "20 s"
run sends_large scenarios/head_to_head_sends.yaml --force --timeout "20 s" --set "tensors.mine.shape=[67108864]"
# N7, N8: lazy and eager communicators.
run lazy scenarios/isend_irecv_wait.yaml --force --timeout "20 s" --set options.init=lazy
run eager scenarios/isend_irecv_wait.yaml --force --timeout "20 s" --set options.init=eager
# N5: tags are ignored. N11: a batch completes as a unit. N12: overlapping communicators.
run tags scenarios/tag_mismatch.yaml --force --timeout "20 s"
run pipeline scenarios/pipeline_1f1b.yaml --force --timeout "60 s"
run order scenarios/zoo/f16_order_differs_without_a_cycle.yaml --force --timeout "20 s"
