"""Records the calls that real PyTorch makes: DDP, FSDP2 and FSDP2 with tensor parallelism on Gloo
processes of this machine.

    python -m tests.support.torch_recorder             # records every case again, into tests/data/recorded_<case>.json
    python -m tests.support.torch_recorder ddp fsdp    # only these
    python -m tests.support.torch_recorder --check     # checks that the files are still right

Each rank is a forked process. Its groups are a Python subclass of `dist.ProcessGroup` that records
a call and passes it to the real `ProcessGroupGloo`; this includes calls from C++ (DDP's reducer).
Reductions that Gloo does not support (the average) are computed here, after the sum, so a recording
contains the calls that PyTorch requested.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DATA = Path(__file__).resolve().parents[1] / "data"
#: Seconds until a case is given up.
LIMIT_S = 120
Record = dict[str, Any]


def _name(op: Any) -> str:
    """`sum`, `avg`: the reduce op as torch's Python name, in small letters."""
    return next(
        (
            word.lower()
            for word in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
            if op == getattr(dist.ReduceOp, word)
        ),
        "other",
    )


class Recorder(dist.ProcessGroup):
    """One group of one rank. ``log`` is shared by all groups of the rank, so that the order among
    groups is kept.
    """

    def __init__(self, inner: Any, rank: int, ranks: list[int], log: list[Record]) -> None:
        super().__init__(rank, len(ranks))
        self.inner, self.ranks, self.log = inner, ranks, log
        self._name = self._desc = ""

    # --- what torch asks of a group ---
    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "recorder"

    def size(self) -> int:
        return len(self.ranks)

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def note(
        self,
        op: str,
        tensor: Any,
        opts: Any = None,
        *,
        asynchronous: bool | None = None,
        **more: Any,
    ) -> None:
        """One call: the operation, its group, what one rank hands in (elements and dtype), and
        whether the caller goes on at once.
        """
        if asynchronous is None:
            asynchronous = bool(getattr(opts, "asyncOp", True))
        reduces = {"reduce_op": _name(opts.reduceOp)} if hasattr(opts, "reduceOp") else {}
        record = {
            "op": op,
            "ranks": self.ranks,
            "numel": 0 if tensor is None else tensor.numel(),
            "async": asynchronous,
        }
        dtype = {} if tensor is None else {"dtype": str(tensor.dtype).removeprefix("torch.")}
        self.log.append({**record, **dtype, **reduces, **more})

    # --- collectives ---
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = (
            [tensors] if isinstance(tensors, torch.Tensor) else tensors
        )  # Join hands one over as it is
        self.note("all_reduce", tensors[0], opts, **({"reduce_op": "sum"} if opts is None else {}))
        return self._reduced(self.inner.allreduce, tensors, (tensors,), opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        for tensor in tensors:
            self.note("all_reduce", tensor, opts, coalesced=True)
        return self._reduced(self.inner.allreduce_coalesced, tensors, (tensors,), opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        self.note("broadcast", tensors[0], opts, root=self.ranks[opts.rootRank])
        return self.inner.broadcast(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        self.note("barrier", None, opts)
        return self.inner.barrier(opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self.note("all_gather", inputs[0], opts)
        return self.inner.allgather(outputs, inputs, *([] if opts is None else [opts]))

    def all_gather_single(self, output: Any, input_: Any, opts: Any = None) -> Any:
        self.note("all_gather_into_tensor", input_, opts)
        return self.inner._allgather_base(output, input_, *([] if opts is None else [opts]))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Functional collectives come here, one at a time."""
        works = [
            self.all_gather_single(output, input_, opts)
            for output, input_ in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: Any, input_: Any, opts: Any = None) -> Any:
        self.note("reduce_scatter_tensor", input_, opts)
        return self._reduced(self.inner._reduce_scatter_base, [output], (output, input_), opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        works = [
            self.reduce_scatter_single(output, input_, opts)
            for output, input_ in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduced(
        self, call: Callable[..., Any], outputs: Any, arguments: tuple[Any, ...], opts: Any
    ) -> Any:
        """The real call; an average, which Gloo does not know, as a sum that is divided."""
        if opts is None:
            return call(*arguments)
        average = _name(opts.reduceOp) == "avg"
        if average:
            opts.reduceOp = dist.ReduceOp.SUM
        work = call(*arguments, opts)
        if average:
            work.wait()
            for tensor in outputs:
                tensor.div_(self.size())
        return work

    def all_to_all_single(
        self, output: Any, input_: Any, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Any:
        self.note("all_to_all_single", input_, opts)
        return self.inner.alltoall_base(
            output, input_, out_splits, in_splits, *([] if opts is None else [opts])
        )

    alltoall_base = all_to_all_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self.note("scatter", outputs[0], opts, root=self.ranks[opts.rootRank])
        return self.inner.scatter(outputs, inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self.note("gather", inputs[0], opts, root=self.ranks[opts.rootRank])
        return self.inner.gather(outputs, inputs, opts)

    # --- messages ---
    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        self.note("send", tensors[0], peer=self.ranks[peer])
        return self.inner.send(tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        self.note("recv", tensors[0], peer=self.ranks[peer])
        return self.inner.recv(tensors, peer, tag)


def _number_batches(log: list[Record]) -> None:
    """Messages of one batch_isend_irecv get its number: a group sees them one by one."""
    plain, batches = dist.batch_isend_irecv, count(1)

    def numbered(p2p_op_list: Any) -> Any:
        before, number = len(log), next(batches)
        works = plain(p2p_op_list)
        for record in log[before:]:
            record["batch"] = number
        return works

    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = numbered


def _backend(log: list[Record]) -> Callable[[Any, Any], Recorder]:
    def make(opts: Any, _: Any) -> Recorder:
        inner = dist.ProcessGroupGloo(
            opts.store, opts.group_rank, opts.group_size, timedelta(seconds=60)
        )
        return Recorder(
            inner,
            opts.group_rank,
            list(opts.global_ranks_in_group) or list(range(opts.group_size)),
            log,
        )

    return make


Body = Callable[[int, int, list[Record]], None]


def _rank(rank: int, size: int, body: Body, folder: Path) -> None:
    """One process: joins, runs the case, writes what it saw."""
    log: list[Record] = []
    _number_batches(log)
    dist.Backend.register_backend("recorder", _backend(log), extended_api=True, devices=["cpu"])
    dist.init_process_group(
        "recorder",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    body(rank, size, log)
    (folder / f"{rank}.json").write_text(json.dumps(log))


def record(size: int, body: Body) -> list[list[Record]]:
    """The calls of each rank of a case. Raises RuntimeError where a process fails or does not end
    in time.
    """
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [_forked(rank, size, body, folder) for rank in range(size)]
        failed = _awaited(children)
        if failed:
            raise RuntimeError(f"ranks {failed} failed")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _forked(rank: int, size: int, body: Body, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _rank(rank, size, body, folder)
        status = 0
    except BaseException as error:
        sys.stderr.write(f"rank {rank}: {type(error).__name__}: {error}\n")
        if os.environ.get("RECORDER_DEBUG"):
            import traceback

            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _awaited(children: list[int]) -> list[int]:
    """Which ranks failed. Those that are left at the time limit, or after the first failure, are
    ended by their ids.
    """
    left, failed, end = dict(enumerate(children)), [], time.monotonic() + LIMIT_S
    while left and time.monotonic() < end and not failed:
        for rank, child in list(left.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del left[rank]
                if status:
                    failed.append(rank)
        time.sleep(0.01)
    for rank, child in left.items():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        failed.append(rank)
    return sorted(failed)


def check(names: Iterable[str]) -> int:
    """Records anew and compares with the files; 1 where one differs."""
    from tests.support.torch_recorder_cases import CASES

    status = 0
    for name in names:
        case = CASES[name]
        same = (
            record(case.ranks, case.body)
            == json.loads((DATA / f"recorded_{name}.json").read_text())["calls"]
        )
        sys.stdout.write(f"{name}: {'as recorded' if same else 'differs from the recording'}\n")
        status |= not same
    return int(status)


def write(names: Iterable[str]) -> None:
    from tests.support.torch_recorder_cases import CASES

    DATA.mkdir(exist_ok=True)
    for name in names:
        case = CASES[name]
        calls = record(case.ranks, case.body)
        lines = ",\n".join(
            "    [\n" + ",\n".join("      " + json.dumps(c) for c in rank) + "\n    ]"
            for rank in calls
        )
        made = f"python -m tests.support.torch_recorder {name}, torch {torch.__version__}, Python {platform.python_version()}, Gloo"
        head = {"case": name, "about": case.about, "made": made, "ranks": case.ranks}
        text = "".join(
            f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()
        )
        (DATA / f"recorded_{name}.json").write_text(f'{{\n{text}  "calls": [\n{lines}\n  ]\n}}\n')
        sys.stdout.write(f"{name}: {[len(rank) for rank in calls]} calls\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.support.torch_recorder_cases import CASES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="Cases to record. [default: all]")
    parser.add_argument("--check", action="store_true", help="Only check the recordings.")
    options = parser.parse_args()
    asked = options.names or list(CASES)
    sys.exit(check(asked) if options.check else write(asked))
