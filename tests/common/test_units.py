"""Quantities: what may be written, what is refused and how, and that texts come back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsim.common import units


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("3 ms", 3_000_000),
        ("3ms", 3_000_000),
        ("1.5 us", 1500),
        ("2 µs", 2000),
        ("0 s", 0),
        ("1e3 ns", 1000),
        (".5 s", 500_000_000),
        ("10 min", 600 * 10**9),
        ("1 h", 3600 * 10**9),
        ("0.4 ns", 0),
    ],
)
def test_durations_become_whole_nanoseconds(text: str, ns: int) -> None:
    assert units.parse_duration_ns(text) == ns


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16 B", 16),
        ("4 KiB", 4096),
        ("4 MiB", 4 << 20),
        ("1 GB", 10**9),
        ("1.5 kB", 1500),
        ("2 TiB", 2 << 40),
    ],
)
def test_sizes_become_bytes(text: str, nbytes: int) -> None:
    assert units.parse_size_bytes(text) == nbytes


def test_a_gigabyte_per_second_is_a_byte_per_nanosecond() -> None:
    assert units.parse_bandwidth("50 GB/s") == 50.0
    assert units.parse_bandwidth("25 Gbit/s") == 3.125
    assert units.parse_flop_rate("989 TFLOP/s") == 989_000.0
    assert units.parse_flops("2 TFLOP") == 2e12


@pytest.mark.parametrize(
    "value", [3, 3.0, True, None, "3", "", "ms", "three ms", [1], {"a": 1}, "3 ms later", "\x00"]
)
def test_a_value_without_a_unit_is_refused_with_an_example(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a duration with a unit, such as `3 ms`, found"):
        units.parse_duration_ns(value)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (units.parse_duration_ns, "3 Ms", "did you mean ms?"),
        (units.parse_size_bytes, "4 mib", "did you mean MiB?"),
        (units.parse_bandwidth, "50 GB", "did you mean GB/s?"),
        (units.parse_duration_ns, "-3 ms", "zero or more"),
        (units.parse_duration_ns, "1e900 s", "fits 62 bits"),
        (units.parse_duration_ns, "1e-900 s", ""),
        (units.parse_size_bytes, "0.3 B", "whole bytes"),
        (units.parse_size_bytes, "9e9 TiB", "fits 62 bits"),
    ],
)
def test_wrong_quantities_are_reported_with_the_reason(
    parse: Callable[[str], object], text: str, message: str
) -> None:
    if not message:
        assert parse(text) == 0
        return
    with pytest.raises(ValueError, match="expected") as caught:
        parse(text)

    assert message in str(caught.value)


@given(st.integers(0, 2**61))
def test_durations_and_sizes_survive_formatting_and_parsing(number: int) -> None:
    assert units.parse_duration_ns(units.duration_text(number)) == number
    assert units.parse_size_bytes(units.size_text(number)) == number


@given(st.floats(0, 1e7, allow_subnormal=False))
def test_rates_survive_formatting_and_parsing(number: float) -> None:
    assert units.parse_bandwidth(units.bandwidth_text(number)) == number
    assert units.parse_flop_rate(units.flop_rate_text(number)) == number
    assert units.parse_flops(units.flops_text(number)) == number


def test_tables_round_to_four_digits() -> None:
    assert units.show_ns(3_216_004) == "3.216 ms"
    assert units.show_ns(0) == "0 ns"
    assert units.show_ns(999_999) == "1 ms"
    assert units.show_ns(12) == "12 ns"
    assert units.show_bytes(4 << 20) == "4 MiB"
    assert units.show_bytes(1000) == "1000 B"
