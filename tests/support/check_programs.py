"""Small programs for tests of `check`: one is ok, the others hang, leak, or depend on the order."""

from __future__ import annotations

OK = "world: 2\nbackend: gloo\ntensors: {x: {shape: [4], value: rank}}\nprogram:\n  - all_reduce: {tensor: x}\n"
HANG = """world: 2
backend: gloo
tensors: {x: {shape: [4]}, y: {shape: [4]}}
program:
  - send: {tensor: x, dst: 1 - rank}
  - recv: {tensor: y, src: 1 - rank}
"""
LEAK = """world: 2
backend: nccl
tensors: {x: {shape: [4]}}
program:
  - isend: {tensor: x, dst: 1}
    ranks: 0
  - recv: {tensor: x, src: 0}
    ranks: 1
  - barrier: {}
"""
#: Rank 1 must not come first: then the receive that names it finds that rank 1 has ended.
ORDER = """world: 3
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - recv: {tensor: x}
    ranks: 0
  - recv: {tensor: x, src: 1}
    ranks: 0
  - compute: {time: 1 ms}
    ranks: 1
  - send: {tensor: x, dst: 0}
    ranks: rank > 0
"""
