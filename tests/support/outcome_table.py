"""The current outcomes of some random programs. `python -m tests.support.outcome_table` regenerates
tests/data/outcomes.json.

The table does not say that an outcome is right: tests/semantics/test_agreement.py compares all ways
to run a program with each other, with naive ones, and with observations (tests/data/settled). The
table shows which outcomes a change affects, even if all ways to run a program change in the same
way. The seeds were chosen from some hundred, one after the other, so that each reaches code of
`distsim/semantics` that the earlier ones do not: programs with every feature
(`tests.support.generator`), and programs in which many ranks run one text (`tests.support.spmd`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from distsim.backends import CONTRACT_READINGS  # noqa: E402
from distsim.scenario import Scenario, load  # noqa: E402
from distsim.semantics.classes.partition import partition_ranks  # noqa: E402
from distsim.semantics.classes.representatives import representative_program  # noqa: E402
from distsim.semantics.form.completion import CompletionConditions  # noqa: E402
from distsim.semantics.form.group_creation import divergent_new_groups  # noqa: E402
from distsim.semantics.form.nccl_connect import connection_mismatches  # noqa: E402
from distsim.semantics.form.order_dependence import exits_with_open_requests, why_order_matters  # noqa: E402
from distsim.semantics.local.quotient import coarsest_quotient  # noqa: E402
from distsim.semantics.ordered.blocked_state import blocked_state_at  # noqa: E402
from distsim.semantics.ordered.state import RowsMismatched  # noqa: E402
from distsim.semantics.ordered.transitions import TransitionRules  # noqa: E402
from distsim.simulation.simulate_scenario import cost_model  # noqa: E402
from tests.support import generator, spmd  # noqa: E402
from tests.support.agreement import EXECUTORS, Case  # noqa: E402

DATA = ROOT / "tests" / "data" / "outcomes.json"
#: Ways to run a program, all of which must give the answers that are kept.
WAYS = ("ordered", "fast", "one_by_one", "in_classes", "surely", "rules", "passes", "all_rules")
DRAWN: dict[str, tuple[int, ...]] = {
    "drawn": (
        15,
        22,
        28,
        54,
        59,
        62,
        66,
        70,
        79,
        99,
        104,
        115,
        118,
        120,
        121,
        123,
        142,
        160,
        161,
        185,
        194,
        197,
        209,
        210,
        211,
        222,
        258,
        276,
        290,
        293,
        296,
        300,
        302,
        314,
        319,
        321,
        326,
    ),
    "of many ranks": (
        5,
        8,
        14,
        15,
        17,
        21,
        45,
        46,
    ),
}
#: By folder the names of files.
FILES = {
    "scenarios": "size_mismatch tag_mismatch findings/ds209_message_of_another_dtype "
    "broadcast cases/uneven_splits_disagree findings/ds105_waited_twice findings/ds123_port_taken "
    "findings/ds124_rank_twice findings/ds125_worlds_differ findings/ds129_two_ways "
    "findings/ds201_unlike_collectives findings/ds205_roots_differ findings/ds210_groups_differ "
    "findings/ds404_put_without_order findings/ds611_barrier_takes_signal get_before_signal put_and_signal "
    "signal_other_channel startup/rank_never_comes startup/world_sizes_differ uneven_all_to_all",
    "tests/data/settled": "all_to_all_of_some blocked_since blocked_since_a_launch killed_before_written_init leave_open_broadcast "
    "leave_open_isend local_group_made_again uneven_prices window_in_order",
    "tests/data/outcomes": "*",
}
_DRAW = {"drawn": generator.scenario, "of many ranks": spmd.program}


def cases() -> Iterator[tuple[str, Callable[[], Scenario]]]:
    """(name, what makes the scenario) of each program."""
    for kind, seeds in DRAWN.items():
        for seed in seeds:
            yield f"{kind} {seed}", partial(_drawn, kind, seed)
    for folder, patterns in FILES.items():
        for path in (
            path
            for pattern in patterns.split()
            for path in sorted((ROOT / folder).glob(f"{pattern}.yaml"))
        ):
            yield str(path.relative_to(ROOT)), partial(load, str(path))


def _drawn(kind: str, seed: int) -> Scenario:
    return Scenario(**_DRAW[kind](seed))


def answers(scenario: Scenario) -> dict[str, list[Any]]:
    """By question all answers that differ: one, where every way to run the program gives the
    same.
    """
    case, found = Case(scenario), dict[str, list[Any]]()
    for said in (
        *(EXECUTORS[way](case) or {} for way in WAYS),
        _form(case),
        _matched(case),
        *_unshared(case),
    ):
        for question, answer in said.items():
            plain = json.loads(json.dumps(answer, default=_plain).replace(f"{ROOT}/", ""))
            if plain not in found.setdefault(question, []):
                found[question].append(plain)
    return found


def _unshared(case: Case) -> Iterator[dict[str, Any]]:
    """What comes of a program that only shared links make one to be run in the order of time, with
    links that nobody shares.
    """
    if case.run.driver == "local clocks" or why_order_matters(case.linked) is not None:
        return
    alone = case.cost.cluster.model_copy(update={"shared_links": False})
    other = Case(case.scenario)
    other.cost = cost_model(case.scenario, case.program, alone)
    for way in ("ordered", "fast", "one_by_one", "in_classes"):
        yield {
            f"unshared {question}": answer
            for question, answer in (EXECUTORS[way](other) or {}).items()
        }


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _form(case: Case) -> dict[str, Any]:
    """What is known before a program is run: which driver may take it and why, which of its ranks
    are equal, what cannot fit.
    """
    conditions = CompletionConditions(case.linked, case.cost)
    folded = coarsest_quotient(case.linked, conditions, worth=1, rounds=100)
    part = representative_program(case.program, [case.cost], [case.profile], worth=1.0)
    alike = [
        partition_ranks(case.program, [case.cost], [case.profile], shared=shared)
        for shared in (False, True)
    ]
    return {
        "ordered since": why_order_matters(case.linked),
        "leaves open": exits_with_open_requests(case.linked),
        "classes": folded and [one.ranks.tolist() for one in folded.classes],
        "alike": [found and found.of.tolist() for found in alike],
        "stands for": None
        if part is None or part.representative_of is None
        else part.representative_of.tolist(),
        "clashes": connection_mismatches(case.program, case.profile) if case.profile.device else (),
        "groups unlike": sorted(divergent_new_groups(case.program, case.profile).items()),
        "streams": [case.ordered.trace.row(i).queue for i in range(len(case.ordered.trace))],
    }


def _matched(case: Case) -> dict[str, Any]:
    """By the rules, under each reading and the back end: what met and did not fit, in which fields,
    what comes of it and on whom; and where all stand in the end."""
    found: dict[str, Any] = {}
    for name, profile in {**CONTRACT_READINGS, "back end": case.profile}.items():
        rules = TransitionRules(case.program, profile)
        state = rules.initial()
        events = [event for event in rules.settle(state) if isinstance(event, RowsMismatched)]
        found[f"{name} mismatches"] = [
            (
                sorted(rules.linked.place(row) for row in event.rows),
                event.fields,
                event.outcome,
                event.crash,
            )
            for event in events
        ]
        found[f"{name} standstill"] = [
            blocked_state_at(rules, state).ends,
            blocked_state_at(rules, state).blocked,
        ]
    return found


def table() -> dict[str, dict[str, list[Any]]]:
    return {name: answers(made()) for name, made in cases()}


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lines = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
        + "}"
        for name, rows in table().items()
    )
    DATA.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
