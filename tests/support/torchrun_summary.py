"""The summary that torchrun prints when a rank failed."""

from __future__ import annotations


def failure(rank: int, exit_code: str, time: str, pid: int = 0) -> list[str]:
    return [
        f"[{rank}]:",
        f"  time      : 2026-11-23_{time}",
        "  host      : localhost",
        f"  rank      : {rank} (local_rank: {rank})",
        f"  exitcode  : {exit_code} (pid: {pid or 100 + rank})",
        "  error_file: <N/A>",
        "  traceback : Signal received",
    ]


def summary(first: list[str], *others: list[str]) -> str:
    lines = ["Failures:", *(line for other in others for line in other)]
    return "\n".join([*lines, "Root Cause (first observed failure):", *first]) + "\n"
