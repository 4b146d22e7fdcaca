"""Commands refuse arguments that contradict each other or say nothing, before anything runs.

In this process: only the words of the message and the exit status count.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from distsim.cli.application import application
from distsim.cli.shared.trace_output import trace_writer, write_trace_by_suffix
from distsim.common.errors import UsageError
from distsim.trace.jsonl import read_trace, same_trace
from tests.support.source_trees import ROOT

RING = "scenarios/ring_of_four.yaml"
HYBRID = "scenarios/hybrid.yaml"
TRACE = "traces/ring_gloo_4.jsonl"
PLAN = "plan llama3-8b --gpus 8 --cluster dgx-h100 --global-batch 8"


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def refusal(words: str) -> str:
    with pytest.raises(UsageError) as refused:
        CliRunner().invoke(application(), words.split(), catch_exceptions=False)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"run {RING} --report r.html", "--report needs a run"),
        (f"run {RING} --nnodes 3", "4 ranks cannot be divided by --nnodes 3"),
        (f"replay {TRACE} --what-if like-peers=1", "--what-if needs --as-recorded"),
        (f"replay {TRACE} --as-recorded --backend nccl", "but --backend changes it"),
        (f"replay {TRACE} --as-recorded --real", "but --real changes it"),
        (f"replay {TRACE} --scale compute=fast", "--scale compute=fast: expected compute=FACTOR"),
        (f"replay {TRACE} --scale hosts=2", "--scale hosts=2: expected"),
        (f"replay {TRACE} --scale gaps=-1", "--scale gaps=-1: expected"),
        (f"replay {TRACE} --scale gaps=1e9", "--scale gaps=1e9: expected"),
        (f"replay {TRACE} --repeat 3", "--repeat: only valid for a run on torch.distributed"),
        (f"replay {TRACE} --backend auto", "--backend auto: only valid for a run"),
        (f"replay {TRACE} -o t.txt", "the name of a scenario file must end in .yaml"),
        (f"replay {TRACE} --trace t.txt", "t.txt: unknown file type for a trace"),
        (f"replay {TRACE} --trace no/where/t.jsonl", "no/where"),
        (f"{PLAN} -o t.txt", "-o t.txt: unknown file type"),
        (f"{PLAN} -o a.csv -o b.parquet", "-o: only one table can be written"),
        (f"{PLAN} --gpus 8,many", "--gpus 8,many: expected numbers from 1"),
        (f"{PLAN} --gpus 0", "--gpus 0: expected numbers from 1"),
        (f"{PLAN} --cluster ,", "--cluster: expected a preset or a file"),
        (f"simulate {RING} --stragglers 1%x1.3", "--stragglers needs several runs"),
        (f"simulate {RING} --seeds 3 --format json", "print text only"),
        (f"simulate {TRACE} --what-if", "is a trace, but what-if questions need a scenario"),
        (f"simulate {HYBRID} --seeds 3", "--seeds: nothing in the scenario is random"),
        (f"simulate {RING} --trace t.txt", "t.txt: unknown file type for a trace"),
        ("bench --ranks 2,few", "expected numbers of ranks, found `few`"),
        ("bench --ranks 1", "a measurement needs at least two ranks"),
        ("bench --ranks 1025", "bench starts at most 1024"),
        ("bench --sizes big", "--sizes: "),
        ("bench --sizes 1023B", "--sizes: 1023B is below 1 KiB"),
        ("bench --ops all_reduc", "bench cannot measure `all_reduc`; did you mean all_reduce?"),
        ("bench --timeout soon", "--timeout: "),
        ("calibrate missing.json -o c.yaml", "missing.json cannot be read"),
        (f"check {RING} {HYBRID} --report r.html", "--report"),
        ("slow sample --format json -o slow.txt", "slow.txt"),
    ],
)
def test_a_command_refuses_what_it_cannot_do(words: str, message: str) -> None:
    assert message in refusal(words)


def test_a_trace_is_written_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    trace = read_trace(TRACE)
    for name in ("t.jsonl", "t.jsonl.gz"):
        write_trace_by_suffix(tmp_path / name, trace)
        assert same_trace(read_trace(tmp_path / name), trace)
    write_trace_by_suffix(tmp_path / "t.json", trace)

    assert "traceEvents" in (tmp_path / "t.json").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="unknown file type"):
        trace_writer(tmp_path / "t.yaml")


def output(words: str) -> str:
    answer = CliRunner(env={"COLUMNS": "80"}).invoke(
        application(), words.split(), catch_exceptions=False
    )
    assert answer.exit_code in (0, 1), answer.output
    return answer.output


def test_a_launch_plan_repeats_the_options_that_differ_from_their_defaults() -> None:
    plain = output(f"run {RING}")
    chosen = output(
        f"run {RING} --backend gloo --device cpu --timeout 3s --launcher spawn --init-method tcp "
        "--repeat 2 --force --set seed=3"
    )
    words = " ".join(chosen.replace("\\\n", " ").split())

    assert f"distsim run {RING} --real" in " ".join(plain.split())
    assert "--repeat" not in plain
    assert (
        f"run {RING} --real --backend gloo --device cpu --timeout 3s --launcher spawn "
        "--init-method tcp --repeat 2 --force --set seed=3"
    ) in words


def test_a_launch_plan_for_several_nodes_has_their_address_and_port() -> None:
    text = output(f"run {RING} --nnodes 2 --master-addr node7 --master-port 1234")

    assert "--nnodes=2" in text
    assert "--nproc_per_node=2" in text
    assert "node7" in text
    assert "1234" in text


def test_what_if_tables_show_the_path_the_gains_and_the_spread() -> None:
    gains = output(f"simulate {HYBRID} --what-if")
    spread = output(f"simulate {HYBRID} --seeds 3 --set jitter=0.1 --stragglers 50%x2")
    other = output(f"simulate {HYBRID} --compare-with {HYBRID} --cluster dgx-h100")

    assert "compute" in gains
    assert "(jitter up to 10 %, 50 % of the ranks slowed by a factor of 2)" in " ".join(
        spread.split()
    )
    assert f"{HYBRID} cluster=dgx-h100" in " ".join(other.split())


def test_a_trace_becomes_a_scenario_that_behaves_the_same(tmp_path: Path) -> None:
    file = tmp_path / "again.yaml"
    output(f"replay {TRACE} -o {file}")

    assert "completes" in output(f"simulate {file}")
