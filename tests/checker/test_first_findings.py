"""The first finding of a program names its cause and the way out; what follows from it is a line of
it, and equal ranks are told once.
"""

from __future__ import annotations

import pytest

from distsim.checker.diagnosis.match_findings import without_repeated_findings
from distsim.checker.verdict import verdict_of
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.output.text.check_results import check_text
from distsim.program.from_calls import build_program
from distsim.scenario import loads
from distsim.simulation.check_scenario import CheckResult, check_program, check_scenario
from distsim.simulation.simulate_scenario import simulate
from tests.support.harness import work

HEAD = "world: {world}\nbackend: {backend}\n{more}tensors: {{x: {{shape: [4]}}, y: {{shape: [8]}}}}\nprogram:\n"


def checked(program: str, world: int = 4, backend: str = "gloo", more: str = "") -> CheckResult:
    return check_scenario(loads(HEAD.format(world=world, backend=backend, more=more) + program))


def errors(program: str, world: int = 4, backend: str = "gloo", more: str = "") -> list[Finding]:
    return [f for f in checked(program, world, backend, more).findings if f.severity == "error"]


# --- one error, its consequences folded ---
@pytest.mark.parametrize(
    ("program", "code", "wakes"),
    [
        # only the back end stands still: gloo's root waits for nobody
        (
            "  - broadcast: {tensor: x, src: 0}\n    ranks: rank != 2\n  - broadcast: {tensor: x, src: 1}\n    ranks: 2\n"
            "options: {stays_connected: true}\n",
            "DS205",
            [
                "rank 2 is blocked in broadcast (<text>:7) and waits for rank 1, which has already "
                "ended",
            ],
        ),
        # the contract stands still as well
        (
            "  - all_reduce: {tensor: x}\n    ranks: rank != 2\n  - barrier\n",
            "DS201",
            [
                "ranks 0, 1 and 3 are blocked in barrier (<text>:7) and wait for rank 2, which has "
                "already ended"
            ],
        ),
        (
            "  - new_group: {name: a, ranks: [0, 1]}\n    ranks: rank != 1\n  - new_group: {name: b, ranks: [1, 2]}\n"
            "  - new_group: {name: a, ranks: [0, 1]}\n    ranks: 1\n  - all_reduce: {tensor: x, group: a}\n    ranks: rank < 2\n",
            "DS210",
            [
                "ranks 0 → 1 → 0 wait for each other in a cycle: all are blocked in all_reduce (<text>:10)"
            ],
        ),
    ],
    ids=["roots", "left out", "groups"],
)
def test_waits_behind_a_mismatch_are_reported_with_it(
    program: str, code: str, wakes: list[str]
) -> None:
    found = errors(program)

    assert [f.code for f in found] == [code]
    assert [line for line in found[0].message.splitlines() if "as a result" in line] == [
        f"  as a result, {w}" for w in wakes
    ]


def test_simulation_folds_waits_behind_a_mismatch_like_check() -> None:
    program = "  - broadcast: {tensor: x, src: 0}\n    ranks: rank != 2\n  - broadcast: {tensor: x, src: 1}\n    ranks: 2\n"
    found = simulate(loads(HEAD.format(world=4, backend="gloo", more="") + program)).findings

    assert [f.code for f in found if f.severity == "error"] == ["DS205"]


def test_a_deadlock_before_a_mismatch_keeps_its_own_finding() -> None:
    """Ranks 2 and 3 never come to the call that differs between 0 and 1."""
    swap = "  - send: {tensor: x, dst: 5 - rank}\n    ranks: rank > 1\n  - recv: {tensor: y, src: 5 - rank}\n    ranks: rank > 1\n"
    pair = "mesh: {dp: 2, tp: 2}\n"
    differs = "  - all_reduce: {tensor: x, group: tp}\n    ranks: rank == 0\n  - barrier: {group: tp}\n    ranks: rank == 1\n"
    found = errors(f"{swap}{differs}", more=pair)

    assert [(f.code, f.ranks) for f in found if f.code in ("DS201", "DS301")] == [
        ("DS201", (0, 1)),
        ("DS301", (2, 3)),
    ]


@pytest.mark.parametrize("folded", [True, False])
def test_ranks_that_call_another_operation_are_not_reported_as_skipping(
    folded: bool,
) -> None:
    """DS608 is for calls that no run has reached: the mismatch explains those of its ranks."""
    rest = "" if folded else "  - all_reduce: {tensor: x}\n    ranks: 1\n"
    program = "  - gather: {input: x, output: {shape: [4, 4]}, dst: 0}\n    ranks: 0\n  - barrier\n    ranks: rank > 0\n"
    found = [
        f.code for f in checked(program.replace("- barrier\n", "- barrier:\n") + rest).findings
    ]

    assert "DS608" not in found


def test_a_group_created_in_another_order_is_not_reported_as_lacking_members() -> None:
    program = (
        "  - new_group: {name: a, ranks: [0, 1]}\n    ranks: rank != 1\n  - new_group: {name: b, ranks: [1, 2]}\n"
        "  - new_group: {name: a, ranks: [0, 1]}\n    ranks: 1\n  - all_reduce: {tensor: x, group: a}\n    ranks: rank < 2\n"
    )

    assert "DS608" not in [f.code for f in checked(program).findings]


# --- the rule that was broken, and where ---
def test_a_surplus_call_is_named_with_its_line_even_if_only_sizes_differ() -> None:
    """Rank 1 reduces x once more; its second then meets the others' y."""
    found = errors(
        "  - all_reduce: {tensor: x}\n    ranks: 1\n  - all_reduce: {tensor: x}\n  - all_reduce: {tensor: y}\n"
    )

    assert found[0].code == "DS202"
    assert found[0].help == (
        "move the extra call all_reduce(x, 16 B) (<text>:5) out of the branch that only rank 1 "
        "takes, or remove it: all members of the group must make the same calls",
    )


def test_surplus_calls_are_counted_over_iterations() -> None:
    found = errors(
        "  - all_reduce: {tensor: x}\n  - barrier:\n    ranks: 0\n", more="iterations: 3\n"
    )

    assert found[0].help[0].startswith("move the 3 extra calls (first: barrier(), <text>:7) out")


@pytest.mark.parametrize("ends", [True, False], ids=["they end", "they wait"])
def test_a_group_created_only_by_its_members_names_the_broken_rule(ends: bool) -> None:
    more = "" if ends else "  - all_reduce: {tensor: x}\n"
    found = errors(
        f"  - new_group: {{name: a, ranks: [0, 1]}}\n    ranks: rank < 2\n{more}", backend="mpi"
    )

    assert (
        found[0]
        .help[0]
        .startswith(
            "call new_group on ranks 2 and 3 too: all ranks of the world must call it, members or not."
        )
    )


def test_a_finding_on_a_rank_that_uses_another_group_names_the_group_of_its_peers() -> None:
    program = "  - all_reduce: {tensor: x, group: dp}\n    ranks: rank != 2\n  - all_reduce: {tensor: x, group: tp}\n    ranks: 2\n"
    found = errors(program, more="mesh: {dp: 2, tp: 2}\n")

    assert found[0].help == (
        "on rank 2, call all_reduce on dp instead of tp[dp=1]: rank 0 waits for it on dp[tp=0]",
    )


def test_axes_entered_in_different_orders_on_a_diagonal_get_one_common_order() -> None:
    """No group has all four ranks: none can be entered first by all."""
    program = (
        "  - {all_reduce: {tensor: x, group: tp}, ranks: rank == 0 or rank == 3}\n  - all_reduce: {tensor: x, group: dp}\n"
        "  - {all_reduce: {tensor: x, group: tp}, ranks: rank == 1 or rank == 2}\n"
    )
    found = errors(program, more="mesh: {dp: 2, tp: 2}\n")

    assert found[0].help == (
        "use the axes in the same order on all ranks, for example tp first: now they use tp and dp "
        "in different orders",
    )


def test_an_overwritten_handle_is_the_cause_if_gloo_cancels_its_message() -> None:
    program = (
        "  - ranks: 0\n    steps:\n      - repeat: {times: 3, index: i, steps: [{isend: {tensor: x, dst: 1, tag: i, as: h}}]}\n"
        "      - wait: h\n"
        "  - ranks: 1\n    steps:\n      - repeat: {times: 3, index: i, steps: [{recv: {tensor: x, src: 0, tag: i}}]}\n"
    )
    found = errors(program, world=2)

    assert found[0].code == "DS304"
    assert found[0].message.startswith(
        "rank 1 waits to receive a message from rank 0 (<text>:11), but rank 0 overwrote its handle"
    )
    assert "its own handle" in found[0].help[0]


def test_a_batch_that_waits_for_single_calls_is_explained_by_their_communicators() -> None:
    """Both have posted; on nccl a batch travels on the group's communicator, a single call on the
    pair's.
    """
    program = (
        "  - batch_isend_irecv: {ops: [{isend: {tensor: x, dst: 1}}, {irecv: {tensor: y, src: 1}}]}\n    ranks: 0\n"
        "  - recv: {tensor: x, src: 0}\n    ranks: 1\n  - send: {tensor: y, dst: 0}\n    ranks: 1\n"
    )
    found = errors(program, world=2, backend="nccl")

    assert found[0].code == "DS301"
    assert "has posted the send for it" in found[0].message
    assert "later" not in found[0].message
    assert "use batch_isend_irecv on both ranks or on neither" in found[0].help[0]


def test_data_received_in_another_order_are_called_wrong() -> None:
    program = "  - {all_reduce: {tensor: x}, ranks: 0}\n  - all_reduce: {tensor: z}\n  - {all_reduce: {tensor: x}, ranks: 1}\n"
    text = HEAD.format(world=2, backend="nccl", more="").replace(
        "y: {shape: [8]}", "z: {shape: [4]}"
    )
    found = check_scenario(loads(text + program)).findings

    assert [f.code for f in found] == ["DS601"]
    assert "the results are wrong" in found[0].message.splitlines()[0]


# --- equal ranks are told once ---
def test_pairs_that_send_to_each_other_first_are_one_finding() -> None:
    ranks = {
        r: [{"op": op, "peer": r ^ 1, "numel": 1 << 20} for op in ("send", "recv")]
        for r in range(1024)
    }
    found = verdict_of(build_program(1024, ranks)).findings[0]

    assert (found.code, found.ranks, found.core) == (
        "DS301",
        tuple(range(1024)),
        tuple(range(1024)),
    )
    head = "ranks 0 → 1 → 0 wait for each other in a cycle: all are blocked in send"
    assert found.message.splitlines()[0].startswith(head)
    assert found.message.splitlines()[-1] == "  … and 511 more pairs like this"


def test_cycles_in_the_same_calls_are_folded_and_others_are_not() -> None:
    found = errors(
        "  - send: {tensor: x, dst: rank + 1 - 2 * (rank % 2)}\n  - recv: {tensor: x, src: rank + 1 - 2 * (rank % 2)}\n",
        world=6,
    )
    apart = errors(
        "  - {send: {tensor: x, dst: rank + 1 - 2 * (rank % 2)}, ranks: rank < 2}\n"
        "  - {send: {tensor: x, dst: rank + 1 - 2 * (rank % 2)}, ranks: rank > 1}\n"
        "  - recv: {tensor: x, src: rank + 1 - 2 * (rank % 2)}\n",
        world=4,
    )

    assert [f.message.splitlines()[-1] for f in found] == ["  … and 2 more pairs like this"]
    assert found[0].ranks == (0, 1, 2, 3, 4, 5)
    assert [f.ranks for f in apart] == [(0, 1), (2, 3)]


def test_messages_that_differ_only_in_tags_are_folded() -> None:
    found = errors(
        "  - {send: {tensor: x, dst: rank + 1}, ranks: rank % 2 == 0}\n"
        "  - {recv: {tensor: x, src: rank - 1, tag: 1}, ranks: rank % 2 == 1}\n",
        world=6,
    )

    assert [f.code for f in found] == ["DS304"]
    assert "has another tag" in found[0].message


def test_waits_for_a_rank_that_never_starts_are_one_finding_for_any_first_call() -> None:
    program = "  - {send: {tensor: x, dst: rank + 1}, ranks: 0}\n  - {recv: {tensor: x, src: rank - 1}, ranks: 1}\n  - barrier:\n"
    found = errors(program, more="faults: [{rank: 3, kind: absent}]\n")

    assert [(f.code, f.ranks) for f in found if f.code != "DS805"] == [("DS303", (0, 1, 2))]


@pytest.mark.parametrize("kind", ["half ends early", "pairs", "tags"])
def test_time_to_explain_a_hang_scales_with_its_ranks(kind: str) -> None:
    """Four times the ranks, less than six times the work."""

    def calls(rank: int) -> list[dict[str, object]]:
        if kind == "half ends early":
            return [{"op": "barrier"}] * (1 + rank % 2)
        receives = kind == "tags" and rank % 2
        return [
            {
                "op": "recv" if receives else "send",
                "peer": rank ^ 1,
                "numel": 4,
                "tag": int(receives),
            }
        ]

    def hanging(world: int) -> None:
        verdict_of(build_program(world, {r: calls(r) for r in range(world)}))

    hanging(64)

    assert work(lambda: hanging(1024)) < 6 * work(lambda: hanging(256))


def test_a_program_built_in_python_gets_the_same_texts() -> None:
    """No file, no lines: the rule is named all the same."""
    reduce: dict[str, object] = {"op": "all_reduce", "numel": 4}
    ranks: dict[int, list[dict[str, object]]] = {
        0: [{"op": "barrier"}, reduce],
        1: [reduce],
        2: [reduce],
    }
    found = check_program(build_program(3, ranks)).findings[0]

    assert found.code == "DS201"
    assert found.help[0].startswith("move the extra call barrier()")


# --- where verdict and outcome part ---
@pytest.mark.parametrize(
    ("program", "backend", "more", "second"),
    [
        (
            "  - batch_isend_irecv: {ops: [{isend: {tensor: x, dst: 1}}, {irecv: {tensor: y, src: 1}}]}\n    ranks: 0\n"
            "  - recv: {tensor: x, src: 0}\n    ranks: 1\n  - send: {tensor: y, dst: 0}\n    ranks: 1\n",
            "nccl",
            "",
            "The program follows the rules of torch.distributed, but on nccl it hangs (see DS301).",
        ),
        (
            "  - {all_reduce: {tensor: x}, ranks: 0}\n  - barrier\n  - {all_reduce: {tensor: x, op: max}, ranks: 1}\n",
            "gloo",
            "",
            "",
        ),
        (
            "  - new_group: {name: a, ranks: [0]}\n    ranks: 0\n  - all_reduce: {tensor: x}\n",
            "nccl",
            "",
            "The program completes on nccl, but it is not correct (see DS301).",
        ),
        (
            "  - all_reduce: {tensor: x, group: g}\n",
            "gloo",
            "groups: {g: [0]}\n",
            "A call has an invalid argument, although the program completes on gloo (see DS104).",
        ),
        (
            "  - {isend: {tensor: x, dst: 1}, ranks: 0}\n  - barrier\n  - {recv: {tensor: x, src: 0}, ranks: 1}\n",
            "gloo",
            "options: {stays_connected: true}\n",
            "The program follows the rules of torch.distributed, but on gloo it hangs (see DS304).",
        ),
    ],
    ids=["batch", "they agree", "completes but wrong", "argument", "dropped"],
)
def test_a_verdict_that_differs_from_the_outcome_is_explained_below_the_first_line(
    program: str, backend: str, more: str, second: str
) -> None:
    """The sentence runs over lines of 80 columns; where they agree there is none."""
    text = check_text([checked(program.replace("- barrier\n", "- barrier:\n"), 2, backend, more)])
    below = " ".join(text.partition("\n")[2].split())

    assert below.startswith(second) if second else "(see DS" not in below


# --- who has left, and which call it does not make ---
def test_a_call_in_a_branch_that_peers_skip_is_reported_once_with_its_line() -> None:
    found = checked("  - all_reduce: {tensor: x}\n  - barrier:\n    ranks: rank < 3\n").findings

    assert [f.code for f in found] == ["DS302"]
    assert found[0].help == (
        "call barrier() (<text>:6) on rank 3 too, or move it out of the branch that only ranks 0, "
        "1 and 2 take",
    )


def test_a_surplus_call_is_not_reported_as_skipped_by_the_other_ranks() -> None:
    program = "  - repeat: {times: {0: 3, else: 2}, index: i, steps: [{all_reduce: {tensor: x}}]}\n"
    found = errors(program)

    assert "rank 0 makes more calls than the others. Common causes: uneven" in found[0].help[0]
    fewer = errors(program.replace("0: 3, else: 2", "0: 2, else: 3"))
    assert "rank 0 makes fewer calls. Common causes: uneven batches" in fewer[0].help[0]


def test_a_rank_that_called_exit_is_reported_with_its_code_and_its_log() -> None:
    program = "  - exit: {code: CODE}\n    ranks: 2\n  - all_reduce: {tensor: x}\n"
    told = [errors(program.replace("CODE", code))[0] for code in ("1", "0")]

    assert [f.message.splitlines()[0].partition(" and wait for ")[2] for f in told] == [
        "rank 2, which has exited with code 1",
        "rank 2, which has exited early",
    ]
    assert [f.help[0].split(" ")[0] for f in told] == ["find", "let"]


@pytest.mark.parametrize(("backend", "raises"), [("gloo", True), ("nccl", False)])
def test_a_finding_says_what_peers_of_an_ended_process_see(backend: str, raises: bool) -> None:
    """Reaching the end of the program and `exit` are the same."""
    ends = "  - all_reduce: {tensor: x}\n    ranks: rank < 3\n"

    for program in (ends, "  - exit:\n    ranks: 3\n" + ends):
        message = errors(program, backend=backend)[0].message
        assert ("Connection closed by peer" in message) == raises


def test_a_dropped_request_is_reported_before_the_wait_that_it_causes() -> None:
    found = errors(
        "  - {isend: {tensor: x, dst: 1}, ranks: 0}\n  - barrier:\n  - {recv: {tensor: x, src: 0}, ranks: 1}\n",
        world=2,
    )

    assert [f.code for f in found] == ["DS304"]
    assert found[0].message.startswith(
        "rank 1 waits to receive a message from rank 0 (<text>:7), but rank 0 did not keep its request"
    )


# --- the slip itself ---
def test_a_wrong_group_is_reported_first_with_both_lines_and_no_contradicting_note() -> None:
    program = "  - all_reduce: {tensor: x, group: dp}\n    ranks: rank != 2\n  - all_reduce: {tensor: x, group: tp}\n    ranks: 2\n"
    found = checked(program, more="mesh: {dp: 2, tp: 2}\n").findings

    assert [f.code for f in found] == ["DS302"]
    assert found[0].message.startswith(
        "rank 2 calls all_reduce on tp[dp=1], but rank 0 waits for it on dp[tp=0]\n"
        "  rank 2 is blocked in all_reduce"
    )
    assert sorted(place.line for place in found[0].places) == [6, 8]


def test_a_group_that_some_ranks_skip_is_reported_first_and_a_later_creation_is_not_missing() -> (
    None
):
    alone = errors(
        "  - new_group: {name: a, ranks: [0, 1]}\n    ranks: rank < 2\n  - all_reduce: {tensor: x}\n",
        backend="mpi",
    )
    later = errors(
        "  - new_group: {name: a, ranks: [0, 1]}\n    ranks: rank < 2\n  - new_group: {name: b, ranks: [0, 2]}\n",
        world=3,
    )

    assert alone[0].message.startswith(
        "ranks 2 and 3 never call new_group(a), which all ranks must call\n"
    )
    assert [f.code for f in later] == ["DS210"]
    assert "never call" not in later[0].message


def test_models_that_differ_between_ranks_are_an_error_at_their_construction() -> None:
    ddp = "  - ranks: {0}\n    steps:\n      - ddp: {{layers: {{params: [[4]], forward: 1 ms, backward: 1 ms, count: {1}}}}}\n"
    found = errors(ddp.format("rank == 0", 3) + ddp.format("rank == 1", 2), world=2, backend="nccl")

    assert found[0].message.startswith("DistributedDataParallel wraps different models")
    assert "DDP expects same model across all ranks" in found[0].help[0]
    assert "pad" not in " ".join(found[0].help)


def test_a_skipped_collective_does_not_suggest_to_move_a_message() -> None:
    program = (
        "  - broadcast: {tensor: x, src: 1}\n    ranks: rank != 2\n  - recv: {tensor: x, src: 2}\n    ranks: 1\n"
        "  - send: {tensor: x, dst: 1}\n    ranks: 2\n"
    )

    assert errors(program, world=3)[0].help == (
        "call broadcast on world on rank 2 too: rank 1 calls it, and every member of the group must "
        "make the same calls",
    )


def test_messages_of_two_groups_are_distinguished_by_group_not_by_tag() -> None:
    program = (
        "  - {send: {tensor: x, dst: 1, group: g}, ranks: 0}\n  - {send: {tensor: x, dst: 1}, ranks: 0}\n"
        "  - {recv: {tensor: x, src: 0}, ranks: 1}\n  - {recv: {tensor: x, src: 0, group: g}, ranks: 1}\n"
    )
    found = errors(program, world=2, more="groups: {g: [0, 1]}\n")

    assert (
        "rank 0 sends a message of g first, but rank 1 receives a message of world first"
        in found[0].help[0]
    )


def test_a_root_that_may_return_early_is_not_called_a_buffered_send() -> None:
    found = checked("  - broadcast: {tensor: x, src: 0}\n    ranks: 0\n", world=2).findings

    assert ["collective with a root" in f.message for f in found if f.code == "DS603"] == [True]


@pytest.mark.parametrize(
    "program",
    [
        "  - send: {tensor: x, dst: rank + 1}\n",
        "  - all_reduce: {tensor: x, group: g}\n",
        "  - broadcast: {tensor: x, src: 3, group: g}\n    ranks: rank < 2\n",
    ],
    ids=["DS101", "DS104", "DS103"],
)
def test_a_wrong_argument_is_reported_with_a_remedy(program: str) -> None:
    found = [
        f
        for f in checked(program, more="groups: {g: [0, 1]}\n").findings
        if f.code.startswith("DS1")
    ]

    assert found
    assert all(f.help for f in found)


def test_a_note_is_omitted_only_if_an_error_reports_its_call_as_the_mistake() -> None:
    """Line 1 is not line 12, and a place that an error only shows is no slip."""
    slip, other, shown = (SourceLocation("x.yaml", line, 3) for line in (12, 1, 7))
    error = Finding(
        "DS302",
        "error",
        "m",
        help=("out of a branch, x.yaml:12",),
        places=(slip, shown),
        slips=(slip,),
    )
    remarks = [Finding("DS608", "note", f"{p.line}", places=(p,)) for p in (slip, other, shown)]

    assert without_repeated_findings([error, *remarks, remarks[1]]) == (error, *remarks[1:])


def test_a_request_with_the_wrong_peer_names_the_line_that_made_it() -> None:
    """The rank is blocked in its wait; the mistake is in the isend."""
    (found,) = errors(
        "  - isend: {tensor: x, dst: 'rank + 1 if rank != 1 else 0', as: h}\n    ranks: rank < 2\n"
        "  - recv: {tensor: {shape: [4]}, src: rank - 1}\n    ranks: rank > 0\n"
        "  - wait: h\n    ranks: rank < 2\n",
        world=3,
    )

    assert found.code == "DS304"
    assert found.help == ("set rank 1's `dst` to 2 in its isend (<text>:5)",)
