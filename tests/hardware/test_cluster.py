"""Clusters as data: presets, overrides, people's units."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distsim.backends import default_cluster
from distsim.common.errors import UsageError
from distsim.hardware.cluster import PRESETS, Cluster, cluster_from, preset


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_complete_and_cites_its_source(name: str) -> None:
    cluster = preset(name)

    assert cluster.name == name
    assert all(
        (
            cluster.source,
            cluster.error_band,
            cluster.device.source,
            cluster.intra.source,
            cluster.nics.source,
        )
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_cluster_parses_to_the_same_cluster(name: str) -> None:
    cluster = preset(name)

    assert cluster_from(cluster.to_mapping()) == cluster


def test_presets_have_the_numbers_of_the_data_sheets() -> None:
    a100, h100 = preset("dgx-a100"), preset("dgx-h100")

    assert (a100.device.peak["bfloat16"], h100.device.peak["bfloat16"]) == (
        312_000,
        989_000,
    )  # FLOP per ns
    assert (a100.intra.bytes_per_ns, h100.intra.bytes_per_ns) == (300, 450)
    assert (a100.nics.count * a100.nics.bytes_per_ns, h100.nics.count * h100.nics.bytes_per_ns) == (
        200,
        400,
    )
    assert (a100.device.memory_bytes_per_ns, h100.device.memory_bytes_per_ns) == (2039, 3350)


@pytest.mark.parametrize(
    ("peak", "expected_flop_per_ns"),
    [
        ({"bfloat16": "312 TFLOP/s", "float32": "19.5 TFLOP/s", "int8": "5 TFLOP/s"}, 19_500),
        ({"bfloat16": "312 TFLOP/s", "float16": "300 TFLOP/s"}, 300_000),
    ],
)
def test_a_dtype_without_a_peak_rate_uses_that_of_float32_or_else_the_lowest(
    peak: dict[str, str], expected_flop_per_ns: float
) -> None:
    given = preset("dgx-a100").to_mapping()
    cluster = cluster_from({**given, "device": {**given["device"], "peak": peak}})

    assert cluster.device.peak_flop_per_ns("float64") == expected_flop_per_ns


@pytest.mark.parametrize("name", PRESETS)
def test_the_comments_on_the_numbers_of_a_preset_cite_a_source(name: str) -> None:
    """A data sheet, a cloud's page, NCCL's source or a published measurement; what is a guess says
    so.
    """
    cluster = preset(name)
    known = re.compile(
        r"data sheet|NCCL|AWS|Google|Azure|IEEE|published|TACC|AMD|arXiv|usual|guess|GHz"
    )
    parts = (cluster, cluster.device, cluster.intra, cluster.nics, cluster.network)

    assert [part.source for part in parts if not known.search(part.source)] == []


def test_an_override_changes_one_number_and_the_name() -> None:
    cluster = cluster_from({"preset": "dgx-h100", "nics": {"count": 4}, "shared_links": False})

    assert cluster.nics == preset("dgx-h100").nics.model_copy(update={"count": 4})
    assert (cluster.name, cluster.shared_links) == ("dgx-h100, changed", False)
    assert preset("dgx-h100").nics.count == 8


def test_defaults_depend_on_the_backend() -> None:
    assert [default_cluster(b).name for b in ("nccl", "gloo", "mpi")] == [
        "dgx-a100",
        "cpu-10gbe",
        "cpu-10gbe",
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dgx-a10", "unknown cluster preset `dgx-a10`.*did you mean dgx-a100?"),
        ({"preset": 3}, "unknown cluster preset `3`"),
        (
            {"preset": "dgx-a100", "nics": {"cuont": 4}},
            r"cluster.nics.cuont: unknown key; did you mean count\?",
        ),
        (
            {"preset": "dgx-a100", "intra": {"latency": 3}},
            "intra.latency: expected a duration with a unit, such as `3 ms`, found 3",
        ),
        ({"preset": "dgx-a100", "network": 3}, "cluster.network: "),
        (
            {"preset": "dgx-a100", "nics": {"bandwidth": "0 GB/s"}},
            "cluster.nics.bandwidth: .*greater than 0",
        ),
        ({"name": "mine"}, "cluster.device: this key is missing"),
    ],
)
def test_a_wrong_cluster_is_refused_with_the_key_and_the_expected_value(
    value: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        cluster_from(value)


def test_a_cluster_is_frozen() -> None:
    cluster = preset("cpu-10gbe")

    with pytest.raises(ValueError, match="frozen"):
        cluster.name = "other"  # type: ignore[misc]


def test_an_already_loaded_cluster_is_accepted() -> None:
    cluster: Cluster = preset("cpu-25gbe")

    assert cluster_from(cluster) is cluster


def test_explain_shows_the_cost_on_a_modified_preset(cli: Any) -> None:
    """`--set` means in `explain` what it means in `simulate`; with half the cards three nodes take
    longer, as their bandwidth says.
    """
    asked = ("explain", "all_reduce", "--cluster", "dgx-a100", "--ranks", "24", "--bytes", "1GiB")
    whole, half = cli(*asked), cli(*asked, "--set", "nics.count=4")
    same, wrong = cli(*asked, "--set", "cluster.nics.count=4"), cli(*asked, "--set", "nics.cout=4")

    busbw = [float(re.findall(r"busbw\s+([\d.]+)", one.stdout)[0]) for one in (whole, half)]
    assert busbw[0] > 1.8 * busbw[1]
    assert same.stdout == half.stdout
    assert wrong.returncode == 2
    assert "did you mean count?" in wrong.stderr
    assert "add `--cluster" in cli("explain", "all_reduce", "--set", "nics.count=4").stderr
