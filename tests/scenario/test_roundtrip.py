"""`loads(s.to_yaml()) == s` for scenarios of any shape, built in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distsim.common.expressions import ExpressionError
from distsim.operations.registry import OPERATIONS
from distsim.scenario import Scenario, load, loads
from distsim.scenario.format.dump import entry_data, to_yaml
from distsim.scenario.format.models.entries import RESERVED_NAMES
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from tests.support.harness import draws

SCENARIOS = sorted((Path(__file__).resolve().parents[2] / "scenarios").glob("*.yaml"))
TENSORS = ("x", "y", "z")
HANDLES = ("h", "k")
WORLD = 4

durations = st.integers(0, 10**12).map(lambda ns: f"{ns} ns")
timeouts = st.integers(1, 10**12).map(lambda ns: f"{ns} ns")
conditions = st.sampled_from(
    ["rank == 0", "dp == 1 or pp == 0", "not (rank > 2)", "min(rank, 1) == 1", "true"]
)
numbers = st.one_of(
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.sampled_from(["rank + 1", "2 * pp", "n"]),
)
selectors = st.one_of(
    st.integers(0, WORLD - 1), st.lists(st.integers(0, WORLD - 1), unique=True), conditions
)
labels = st.one_of(
    st.text(st.characters(exclude_categories=["C"]), max_size=12),
    st.sampled_from(["no", "010", "1e6", "~", "<<", "a: b", "# c", "- d", "!x", "'", "é"]),
)
tensors = st.one_of(
    st.sampled_from([*TENSORS, "x@0", "y@(rank + 1)"]),
    st.fixed_dictionaries({"shape": st.just([2, "pp_size"]), "dtype": st.just("int32")}),
)


def per_rank(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    ranks = st.dictionaries(st.integers(0, WORLD - 1), one, min_size=1, max_size=2)
    return st.one_of(one, ranks, st.tuples(ranks, one).map(lambda t: {**t[0], "else": t[1]}))


def mapping(
    required: dict[str, Any], optional: dict[str, Any]
) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


ranks_ = per_rank(st.one_of(st.integers(0, 9), st.just("rank + 1")))
groups = st.sampled_from(["dp", "pp", ["dp", "pp"], "g", "world"])
message = {"group": groups, "tag": per_rank(st.integers(0, 9))}
started = st.sampled_from(HANDLES)
steps = st.one_of(
    st.builds(lambda f: {"send": f}, mapping({"tensor": tensors, "dst": ranks_}, message)),
    st.builds(lambda f: {"recv": f}, mapping({"tensor": tensors, "src": ranks_}, message)),
    st.builds(
        lambda f: {"irecv": f},
        mapping({"tensor": tensors}, {**message, "as": started, "assume_src": ranks_}),
    ),
    st.builds(
        lambda f, h: {"all_reduce": {**f, **h}},
        mapping({"tensor": tensors}, {"group": groups, "op": st.sampled_from(["sum", "max"])}),
        st.one_of(st.just({}), st.builds(lambda h: {"async": True, "as": h}, started)),
    ),
    st.builds(
        lambda f: {"all_to_all_single": f},
        mapping(
            {"input": tensors, "output": tensors}, {"input_splits": per_rank(st.just([1, "rank"]))}
        ),
    ),
    st.builds(
        lambda f: {"compute": f},
        mapping(
            {"time": per_rank(durations)},
            {"name": labels, "reads": st.just(["x", "y@1"]), "on": st.just("host")},
        ),
    ),
    st.builds(
        lambda f: {"compute": f},
        mapping({"flops": st.just("2 TFLOP")}, {"bytes": st.just("3 MiB"), "adds": st.just(["z"])}),
    ),
    st.builds(
        lambda entries: {"compute": {"work": entries}},
        st.lists(
            mapping(
                {"bytes": per_rank(st.just("3 MiB"))},
                {"flops": st.just("2 TFLOP"), "kernels": st.just(4), "dtype": st.just("bfloat16")},
            ),
            min_size=1,
            max_size=2,
        ),
    ),
    st.builds(
        lambda v: {"assign": {"tensor": "z", "value": v}},
        st.one_of(numbers, st.lists(numbers, max_size=3), st.just("x + index")),
    ),
    st.builds(lambda n: {"fail": n}, labels),
    st.builds(lambda d: {"sleep": d}, durations),
    st.sampled_from(
        [
            "barrier",
            {"wait": "all"},
            {"wait": ["h", "k@rank"]},
            {"exit": 3},
            "synchronize",
            {"new_group": {"name": "made", "ranks": [0, 1]}},
        ]
    ),
)
batches = st.lists(
    st.builds(lambda d: {"isend": {"tensor": "x", "dst": d}}, ranks_), min_size=1, max_size=2
).map(lambda ops: {"batch_isend_irecv": {"ops": ops, "as": "h"}})


def chosen(entry: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        entry,
        st.tuples(entry, selectors).map(
            lambda t: {**t[0], "ranks": t[1]} if isinstance(t[0], dict) else t[0]
        ),
    )


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, max_size=3)
    repeat = st.tuples(per_rank(st.one_of(st.integers(0, 5), st.just("n + 1"))), body).map(
        lambda t: {"repeat": {"times": t[0], "steps": t[1]}}
    )
    return st.one_of(
        chosen(repeat), st.tuples(selectors, body).map(lambda t: {"ranks": t[0], "steps": t[1]})
    )


programs = st.lists(
    st.recursive(chosen(st.one_of(steps, batches)), around, max_leaves=5), max_size=4
)
scenarios = st.fixed_dictionaries(
    {
        "name": labels.filter(str.strip),
        "world": st.just({"nodes": 2, "ranks_per_node": 2}),
        "mesh": st.just({"dp": 2, "pp": 2}),
        "vars": st.fixed_dictionaries(
            {"n": st.integers(0, 4)},
            optional={"flag": conditions, "m": st.just("world_size * rank")},
        ),
        "groups": st.fixed_dictionaries(
            {"g": st.just([0, 1])}, optional={"q": st.just({"by": "rank % 2", "timeout": "3 s"})}
        ),
        "tensors": st.fixed_dictionaries(
            {
                "x": mapping(
                    {
                        "shape": st.lists(
                            st.one_of(st.integers(0, 9), st.just("pp_size")), max_size=3
                        )
                    },
                    {"value": numbers, "copies": st.just("n + 1")},
                ),
                "y": mapping(
                    {"like": st.just("x")}, {"dtype": st.sampled_from(["int8", "bfloat16"])}
                ),
                "z": mapping(
                    {"shape": st.just("auto")}, {"value": per_rank(st.lists(numbers, max_size=2))}
                ),
            }
        ),
        # every handle that a wait may name is bound
        "program": programs.map(
            lambda p: [*({"isend": {"tensor": "x", "dst": 1, "as": h}} for h in HANDLES), *p]
        ),
    },
    optional={
        "about": labels,
        "backend": st.sampled_from(["gloo", "nccl", "mpi"]),
        "cluster": st.sampled_from(["dgx-a100", "some/file.yaml", {"preset": "dgx-h100"}]),
        "iterations": st.integers(1, 9),
        "options": mapping(
            {},
            {
                "init": st.just("eager"),
                "timeout": timeouts,
                "buffsize": st.just("1 MiB"),
                "blocking_wait": st.booleans(),
            },
        ),
        "launch": mapping({}, {"master_port": st.integers(1, 65535), "start": st.just("fork")}),
        "faults": st.lists(
            st.sampled_from(
                [
                    {"rank": 1, "kind": "kill", "at": "3 ms"},
                    {"ranks": "node == 1", "kind": "slow", "factor": 1.5},
                    {"ranks": 2, "kind": "late", "delay": "1 ms"},
                ]
            ),
            max_size=2,
        ),
        "seed": st.integers(0, 99),
        "jitter": st.sampled_from([0.0, 0.25]),
        "expect": mapping(
            {},
            {
                "verdict": st.just("ok"),
                "depends_on": st.none(),
                "outcome": st.just({"gloo": "hangs"}),
                "ranks": st.just([0]),
                "values": st.just({"x": {0: [1, 2.5], "other_ranks": "?"}}),
                "makespan": st.just({"at_most": "3 ms"}),
            },
        ),
    },
)


@settings(max_examples=draws(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios)
def test_a_written_scenario_parses_to_the_same_scenario(data: dict[str, Any]) -> None:
    scenario = Scenario(**data)
    text = scenario.to_yaml()

    assert loads(text) == scenario
    assert loads(text).to_yaml() == text


def test_every_scenario_of_the_project_survives_writing_and_reading() -> None:
    assert [file.stem for file in SCENARIOS if loads(load(file).to_yaml()) != load(file)] == []


def test_flat_yaml_keeps_a_block_only_if_it_selects_ranks() -> None:
    scenario = loads("""
world: 2
backend: gloo
program:
  - steps:
      - barrier
      - repeat: {times: 2, steps: [{steps: [barrier]}]}
      - {ranks: 0, steps: [{steps: [{compute: {time: 1 ms}}]}]}
""")
    block = {"ranks": 0, "steps": [{"compute": {"time": "1 ms"}}]}

    flat = loads(to_yaml(dict(scenario), flat=True))
    assert [entry_data(entry) for entry in flat.program] == [
        {"barrier": {}},
        {"repeat": {"times": 2, "steps": [{"barrier": {}}]}},
        block,
    ]


texts = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp")))
leaves = st.one_of(
    texts,
    st.integers(-(10**15), 10**15),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)
names = st.text(
    st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp")), max_size=3
).filter(lambda key: ":" not in key)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=draws(300), deadline=None)
@given(trees)
def test_written_data_parse_to_the_same_data(data: Any) -> None:
    """Texts that look like numbers, booleans or keys stay texts; control characters, which are read
    written out, are not among them.
    """
    from distsim.scenario.format.source.construct import construct
    from distsim.scenario.format.source.problems import ProblemCollector

    document = YamlDocument("f", dump_yaml({"data": [data]}))
    problems = ProblemCollector(document)

    assert construct(document, compose(document), problems) == {"data": [data]}
    assert not problems


def test_reserved_words_are_those_of_the_grammar() -> None:
    assert {
        "rank",
        "world_size",
        "node",
        "local_rank",
        "group_rank",
        "group_size",
        "index",
        "copy",
        "min",
        "max",
    } <= set(RESERVED_NAMES)
    assert "all" not in RESERVED_NAMES  # a group may be called so
    assert not set(RESERVED_NAMES) & set(OPERATIONS)
    assert issubclass(ExpressionError, ValueError)
