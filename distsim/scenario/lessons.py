"""The lessons of docs/learn: what each is about, and the scenarios that it works with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.common.message_text import did_you_mean
from distsim.scenario.packaged import packaged_scenario


class Lesson(NamedTuple):
    """A page of docs/learn; `able` is what its reader can do at its end, `files` are below
    scenarios/, without `.yaml`.
    """

    name: str
    title: str
    able: str
    files: tuple[str, ...]


LESSONS = (
    Lesson(
        "ranks",
        "Ranks, the world and groups",
        "know which ranks take part, and read a report",
        ("all_reduce",),
    ),
    Lesson(
        "startup",
        "Start-up: how ranks find each other",
        "choose an init_method, and identify start-up failures",
        (
            "startup/tcp",
            "startup/file",
            "startup/file_left",
            "startup/variable_missing",
            "never_starts",
        ),
    ),
    Lesson(
        "messages",
        "Messages: send, recv, isend, irecv",
        "pass tensors between ranks without a hang",
        ("send_one", "isend_irecv_wait", "head_to_head_sends", "tag_mismatch"),
    ),
    Lesson(
        "collectives",
        "The collectives, one by one",
        "choose the right collective",
        (
            "broadcast",
            "reduce",
            "all_reduce",
            "scatter",
            "gather",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "barrier",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
            "uneven_all_to_all",
        ),
    ),
    Lesson(
        "reductions",
        "Reductions: sum, avg, max and others",
        "choose a reduce op, and know what each backend supports",
        ("reduce",),
    ),
    Lesson(
        "groups",
        "Process groups: a part of the world",
        "let some ranks work without the others",
        ("group_sum", "two_groups"),
    ),
    Lesson(
        "machines",
        "Two nodes",
        "set the environment of each process, and reduce traffic on the slow network",
        ("two_machines",),
    ),
    Lesson(
        "data_parallel",
        "DataParallel in nine steps",
        "explain why it does not scale beyond a few GPUs",
        ("strategies/data_parallel",),
    ),
    Lesson(
        "ddp",
        "DistributedDataParallel (DDP)",
        "hide communication behind the backward pass",
        ("ddp_by_hand", "strategies/ddp", "strategies/ddp_uneven"),
    ),
    Lesson(
        "fsdp",
        "Fully sharded data parallelism (FSDP)",
        "train a model that does not fit on one GPU",
        ("strategies/fsdp",),
    ),
    Lesson(
        "hybrid",
        "Hybrid parallelism: two stages, two replicas",
        "build a mesh of pipeline stages and replicas",
        ("hybrid",),
    ),
    Lesson(
        "pipeline",
        "Pipeline parallelism",
        "compute the bubble, and order messages without a hang",
        ("pipeline_1f1b", "pipeline_wrong_order", "strategies/pipeline_1f1b"),
    ),
    Lesson(
        "deadlocks",
        "Deadlocks, and how to find them",
        "find the wait-for cycle and break it",
        ("ring_of_four", "skipped_barrier", "head_to_head_sends", "killed_at_iteration_3"),
    ),
)


def find_lesson(name: str) -> Lesson:
    """A lesson by its name. Raises UsageError where there is none of that name."""
    for one in LESSONS:
        if one.name == name:
            return one
    raise UsageError(
        f"unknown lesson {name!r}{did_you_mean(name, [one.name for one in LESSONS])}",
        "`distsim learn` lists them; `distsim explain NAME` explains an operation or a term",
    )


def lesson_page(name: str) -> str:
    """The text of a lesson, in Markdown. Raises EnvironmentFault if it is not installed."""
    package = Path(__file__).parents[1]
    for folder in (package / "lessons", package.parent / "docs" / "learn"):
        path = folder / f"{name}.md"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise EnvironmentFault(
        f"the page of lesson {name} is missing in this installation", "install distsim again"
    )


def lesson_scenario_text(file: str) -> str:
    """The text of a lesson's scenario: from the installed package, or from the checkout that
    contains it. Raises EnvironmentFault without it.
    """
    path = packaged_scenario(file)
    if path is not None:
        return path.read_text(encoding="utf-8")
    raise EnvironmentFault(
        f"the scenario {file} is not in this installation",
        "reinstall distsim: some of its files are missing",
    )
