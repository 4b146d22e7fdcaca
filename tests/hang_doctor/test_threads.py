"""`distsim doctor` on the evidence of public issue threads (``tests.support.doctor_threads``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence
from tests.support.doctor_threads import THREADS, IssueThread

#: Answers that only say that the files do not suffice.
WITHOUT_LEAD = ("undecided",)


def diagnosed(folder: Path, thread: IssueThread) -> Diagnosis:
    (folder / "job.log").write_text("\n".join(thread.lines) + "\n")
    return diagnose_hang(read_evidence([str(folder)]))


def test_there_are_at_least_40_threads_each_with_a_link_of_its_own() -> None:
    assert len({thread.link for thread in THREADS}) == len(THREADS) >= 40


@pytest.mark.parametrize("thread", THREADS, ids=lambda thread: thread.link)
def test_the_evidence_of_a_thread_gives_its_answer(thread: IssueThread, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, thread)

    assert thread.answer in " | ".join(cause.title for cause in found.causes)


def test_no_thread_blames_a_rank_unless_its_own_error_is_in_the_thread(tmp_path: Path) -> None:
    """An error that a rank raised by itself proves its failure; timeouts prove nothing."""
    blamed = {}
    for number, thread in enumerate(THREADS):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = diagnosed(folder, thread)
        if found.culprits:
            blamed[thread.link] = found.culprits

    assert blamed == {"alibaba/Pai-Megatron-Patch/issues/583": (0,)}


def test_most_threads_give_a_lead(tmp_path: Path) -> None:
    """The answer names ranks, a call or a reason."""
    leads = 0
    for number, thread in enumerate(THREADS):
        folder = tmp_path / str(number)
        folder.mkdir()
        main = diagnosed(folder, thread).main
        leads += main is not None and main.kind not in WITHOUT_LEAD

    assert leads >= 0.6 * len(THREADS)
