"""The process that `tests.support.gloo_oracle` forks ranks from: reads jobs, one JSON object a line.

A forked rank leaves the loop and runs its steps at the top level of this module, so that it ends as
a script does: through the interpreter's finalization and all destructors.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Longer than the oracle watches a program: hangs are seen by it, not by timeouts.
TIMEOUT = timedelta(seconds=300)


class RankProgram:
    """The steps of one rank, made on torch."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.scenario, self.rank = job["scenario"], rank
        self.folder = Path(job["folder"])
        self.groups: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Make all calls of the rank; raises what torch raises."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.rank,
            world_size=self.scenario["world"],
            timeout=TIMEOUT,
        )
        for name, members in self.scenario.get("groups", {}).items():
            self.groups[name] = dist.new_group(members, timeout=TIMEOUT)
        for name, spec in self.scenario["tensors"].items():
            self.tensors[name] = torch.full(spec["shape"], float(spec["value"]))
        for step in self.scenario["program"]:
            if self.rank in step["ranks"]:
                ((op, fields),) = ((key, value) for key, value in step.items() if key != "ranks")
                self._make(op, fields)

    def _make(self, op: str, fields: Any) -> None:
        if op == "wait":
            self.handles.pop(fields).wait()
            return
        arguments = {
            key: value for key, value in fields.items() if key not in ("tensor", "group", "as")
        }
        if "group" in fields:
            arguments["group"] = self.groups[fields["group"]]
        if "async" in arguments:
            arguments["async_op"] = arguments.pop("async")
        special = getattr(self, f"_{op}", None)
        if special is not None:
            special(arguments)
            return
        if "tensor" in fields:
            arguments["tensor"] = self.tensors[fields["tensor"]]
        made = getattr(dist, op)(**arguments)
        if "as" in fields:
            self.handles[fields["as"]] = made

    def _sleep(self, arguments: dict[str, Any]) -> None:
        number, unit = arguments["time"].split()
        time.sleep(float(number) * {"ms": 1e-3, "s": 1.0}[unit])

    def _exit(self, arguments: dict[str, Any]) -> None:
        sys.exit(arguments["code"])

    def _fail(self, arguments: dict[str, Any]) -> None:
        raise RuntimeError(arguments["message"])

    def _new_group(self, arguments: dict[str, Any]) -> None:
        self.groups[arguments["name"]] = dist.new_group(arguments["ranks"], timeout=TIMEOUT)

    def _destroy_process_group(self, arguments: dict[str, Any]) -> None:
        dist.destroy_process_group(arguments.get("group"))

    def _all_gather_object(self, arguments: dict[str, Any]) -> None:
        size = dist.get_world_size(arguments.get("group"))
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, "an object of this rank", arguments.get("group"))

    def _broadcast_object_list(self, arguments: dict[str, Any]) -> None:
        objects: list[Any] = ["an object"] * len(arguments["objects"])
        dist.broadcast_object_list(objects, arguments["src"], arguments.get("group"))


def next_rank() -> RankProgram | None:
    """In the process that forks: None, at the end of the jobs. In a forked rank: its program."""
    for line in sys.stdin:
        job = json.loads(line)
        processes = []
        for rank in range(job["scenario"]["world"]):
            process = os.fork()
            if process == 0:
                # The rank must not read the next jobs or keep the pipes open.
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(null, 1)
                return RankProgram(job, rank)
            processes.append(process)
        print(json.dumps(processes), flush=True)
        print(json.dumps([os.waitpid(process, 0)[1] for process in processes]), flush=True)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The interpreter's finalization collects garbage twice. Ranks can do without the first time,
    # but not without the second one, which destroys the process groups.
    gc.collect()
    gc.disable()
    program = next_rank()
    if program is not None:
        report = program.folder / f"rank{program.rank}"
        try:
            program.run()
        except Exception as error:
            text = f"raised: {type(error).__name__}: {error}"
            report.write_text(text[:1000], encoding="utf-8")
            sys.exit(1)
