"""Starter scenarios for `distsim new`: each loads, completes, and suggests a change to try."""

from __future__ import annotations

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean, name_list

_PLAIN = """\
# Four ranks compute, average their gradients, and update.
name: plain
about: One training iteration with data parallelism.
world: 4                         # or {nodes: 2, ranks_per_node: 2}
backend: gloo                    # rules of gloo, nccl or mpi
cluster: cpu-10gbe               # hardware model; `distsim clusters` lists the presets
tensors:
  grad: {shape: [256, 1024]}
  loss: {shape: [1], value: rank + 1}
program:
  - compute: {name: forward and backward, time: 20 ms, writes: [grad]}
  - all_reduce: {tensor: grad, op: avg}
  - all_reduce: {tensor: loss}
  - compute: {name: optimizer, time: 2 ms, reads: [grad]}
  - barrier                      # try `ranks: 0` on a new line below, and simulate again
expect:                          # `distsim test` checks it
  verdict: ok
  values: {loss: 10}
"""

_RING = """\
# Each rank sends to the next and receives from the one before. Even ranks send first, odd ones receive first.
name: ring
about: A ring of blocking sends that does not hang.
world: 4
backend: gloo
vars: {next: (rank + 1) % world_size, before: (rank - 1) % world_size}
tensors:
  mine: {shape: [4], value: rank}
  got: {shape: [4]}
program:
  - ranks: rank % 2 == 0         # without this split, all ranks send and none receives
    steps:
      - send: {tensor: mine, dst: next}
      - recv: {tensor: got, src: before}
  - ranks: rank % 2 == 1
    steps:
      - recv: {tensor: got, src: before}
      - send: {tensor: mine, dst: next}
expect:
  verdict: ok
  values: {got: {0: 3, 1: 0, 2: 1, 3: 2}}
"""  # noqa: E501 - the text of a file

_DDP = """\
# Data parallelism as in DistributedDataParallel: buckets are reduced while the backward pass runs.
name: ddp
about: Two buckets, each reduced while the next one is computed.
world: {nodes: 1, ranks_per_node: 4}
backend: nccl
cluster: dgx-a100
mesh: {dp: 4}
vars: {buckets: 2}
tensors:
  bucket: {shape: [1024, 1024], dtype: bfloat16, copies: buckets}
program:
  - compute: {name: forward, time: 4 ms}
  - repeat:
      times: buckets
      index: b
      steps:
        - compute: {name: backward, time: 4 ms, writes: [bucket@b]}
        - all_reduce: {tensor: bucket@b, group: dp, op: avg, async: true, as: reduced@b}
  - repeat:
      times: buckets
      index: b
      steps:
        - wait: reduced@b
  - compute: {name: optimizer, time: 1 ms}
iterations: 3
expect:
  verdict: ok
"""

_PIPELINE = """\
# A model split into four stages; micro-batches pass through them one after the other.
name: pipeline
about: The forward pass of a pipeline, four stages, eight micro-batches.
world: {nodes: 1, ranks_per_node: 4}
backend: nccl
cluster: dgx-a100
mesh: {pp: 4}
vars: {micro_batches: 8, first: pp == 0, last: pp == pp_size - 1}
tensors:
  act_in: {shape: [4, 1024], dtype: bfloat16}
  act_out: {like: act_in}
program:
  - repeat:
      times: micro_batches
      index: m
      steps:
        - recv: {tensor: act_in, group: pp, group_src: pp - 1}
          ranks: not first
        - compute: {name: forward, time: 2 ms, reads: [act_in], writes: [act_out]}
        - send: {tensor: act_out, group: pp, group_dst: pp + 1}
          ranks: not last
expect:
  verdict: ok
"""

STARTERS: dict[str, str] = {"plain": _PLAIN, "ring": _RING, "ddp": _DDP, "pipeline": _PIPELINE}


def starter(kind: str = "plain") -> str:
    """The text of a starter scenario. Raises UsageError for an unknown kind."""
    if kind not in STARTERS:
        raise UsageError(
            (
                f"unknown starter `{kind}` (known: "
                f"{name_list(STARTERS)}){did_you_mean(kind, STARTERS)}"
            ),
            "`distsim new FILE --kind ring`",
        )
    return STARTERS[kind]
