"""Numbers with units: `3 ms`, `4 MiB`, `50 GB/s`, `989 TFLOP/s`, and back to text.

In memory a time is an integer of nanoseconds, a size an integer of bytes, and a rate a float per
nanosecond (1 GB/s is 1 byte per ns). ``parse_*`` raise ValueError that states what was expected;
``*_text`` return text that parses to exactly the same number; ``show_*`` round for tables.

Decimal prefixes (k M G T P) are powers of 1000 and binary ones (Ki Mi Gi Ti) powers of 1024, as in
IEC 80000-13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_QUANTITY = re.compile(
    r"\s*([+-]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,3})?)\s*([^\d\s.+-]\S*)?\s*",
    re.ASCII,
)
#: Largest value of every quantity, in its base unit.
MAX_QUANTITY = 2**62

_DURATION_UNITS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
}
_SIZE_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
#: Bytes per ns.
_BANDWIDTH_UNITS = {
    f"{name}/s": Fraction(factor, 10**9) for name, factor in _SIZE_UNITS.items()
} | {
    f"{p}bit/s": Fraction(f, 8 * 10**9)
    for p, f in (("", 1), ("k", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12))
}
_FLOP_UNITS = {
    f"{p}FLOP": 10**k
    for p, k in (("", 0), ("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18))
}
_FLOP_RATE_UNITS = {f"{name}/s": Fraction(factor, 10**9) for name, factor in _FLOP_UNITS.items()}

#: Families of units, with their wording in messages.
_UNIT_FAMILIES: tuple[tuple[str, Mapping[str, int | Fraction]], ...] = (
    ("a duration", _DURATION_UNITS),
    ("a size", _SIZE_UNITS),
    ("a bandwidth", _BANDWIDTH_UNITS),
    ("floating-point operations", _FLOP_UNITS),
    ("a rate of floating-point operations", _FLOP_RATE_UNITS),
)


class MeasurementUnit(NamedTuple):
    """What a unit measures, in the wording of messages, and its value in base units."""

    kind: str
    factor: int | Fraction


#: Every unit by its name.
UNIT_BY_NAME = {
    name: MeasurementUnit(kind, factor)
    for kind, table in _UNIT_FAMILIES
    for name, factor in table.items()
}


def _value_text(value: object) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) or "an empty text"
    return text if len(text) <= 60 else text[:57] + "..."


def _parse_exact(
    value: object, what: str, example: str, table: Mapping[str, int | Fraction]
) -> Fraction:
    """A quantity as an exact number of base units of ``table``."""
    expected = f"expected {what} with a unit, such as `{example}`"
    if not isinstance(value, str):
        raise ValueError(f"{expected}, found {_value_text(value)}")
    match = _QUANTITY.fullmatch(value)
    if match is None or match[2] is None:
        raise ValueError(f"{expected}, found {_value_text(value)}")
    unit = match[2]
    if unit not in table:
        from distsim.common.message_text import did_you_mean, name_list

        other = next((words for words, units in _UNIT_FAMILIES if unit in units), None)
        related = [name for name in (f"{unit}/s", unit.removesuffix("/s")) if name in table]
        meant = did_you_mean(unit, related if other else table)
        known = f"{'of ' + other + ' ' if other else ''}(known: {name_list(table, 14)}){meant}"
        raise ValueError(
            f"expected {what}, such as `{example}`, found the unit {_value_text(unit)} {known}"
        )
    number = Fraction(match[1]) * table[unit]
    if number < 0:
        raise ValueError(f"expected {what} of zero or more, found {_value_text(value)}")
    if number > MAX_QUANTITY:
        raise ValueError(
            f"expected {what} that fits 62 bits in its smallest unit, found {_value_text(value)}"
        )
    return number


def parse_duration_ns(value: object) -> int:
    """`3 ms` in ns, rounded to the nearest integer. Units: ns us ms s min h."""
    return round(_parse_exact(value, "a duration", "3 ms", _DURATION_UNITS))


def parse_timeout_ns(value: object) -> int:
    """A duration above zero, because a wait with a timeout of zero would end before it starts."""
    found = parse_duration_ns(value)
    if not found:
        raise ValueError(
            f"expected a timeout above zero, such as `10 s`, found {_value_text(value)}"
        )
    return found


def parse_size_bytes(value: object) -> int:
    """`4 MiB` in bytes. Units: B, KiB MiB GiB TiB, kB MB GB TB.

    Raises ValueError for a fraction of a byte.
    """
    size = _parse_exact(value, "a size", "4 MiB", _SIZE_UNITS)
    if size.denominator != 1:
        raise ValueError(f"expected a size in whole bytes, found {_value_text(value)}")
    return int(size)


def parse_bandwidth(value: object) -> float:
    """`50 GB/s` in bytes per ns.

    Units: those of sizes per second, and bit/s kbit/s Mbit/s Gbit/s Tbit/s.
    """
    return float(_parse_exact(value, "a bandwidth", "50 GB/s", _BANDWIDTH_UNITS))


def parse_flop_rate(value: object) -> float:
    """`989 TFLOP/s` in floating-point operations per ns. Prefixes: k M G T P E."""
    return float(
        _parse_exact(value, "a rate of floating-point operations", "989 TFLOP/s", _FLOP_RATE_UNITS)
    )


def parse_flops(value: object) -> float:
    """`2 TFLOP` as a number of floating-point operations. Prefixes: k M G T P E."""
    return float(
        _parse_exact(value, "a number of floating-point operations", "2 TFLOP", _FLOP_UNITS)
    )


def _whole_unit_text(number: int, units: tuple[tuple[str, int], ...]) -> str:
    """The number in the largest unit in which it is an integer."""
    for name, factor in units:
        if number and number % factor == 0:
            return f"{number // factor} {name}"
    return f"{number} {units[-1][0]}"


def duration_text(ns: int) -> str:
    """The exact inverse of `parse_duration_ns`: 3000000 is `3 ms`."""
    return _whole_unit_text(ns, (("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)))


def size_text(nbytes: int) -> str:
    """The exact inverse of `parse_size_bytes`: 4194304 is `4 MiB`."""
    return _whole_unit_text(
        nbytes, (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    )


def _exact_text(number: float, table: Mapping[str, int | Fraction], units: tuple[str, ...]) -> str:
    """The shortest text, in one of ``units``, that parses to exactly this float.

    The last unit must have factor 1, so that one text always exists.
    """
    texts = []
    for unit in units:
        scaled = float(Fraction(number) / table[unit])
        digits = repr(int(scaled)) if scaled.is_integer() and scaled < 10**15 else repr(scaled)
        if float(Fraction(digits) * table[unit]) == number:
            texts.append(f"{digits} {unit}")
    return min(texts, key=len)


def bandwidth_text(bytes_per_ns: float) -> str:
    """The exact inverse of `parse_bandwidth`."""
    return _exact_text(bytes_per_ns, _BANDWIDTH_UNITS, ("TB/s", "MB/s", "GB/s"))


def flop_rate_text(flop_per_ns: float) -> str:
    """The exact inverse of `parse_flop_rate`."""
    return _exact_text(flop_per_ns, _FLOP_RATE_UNITS, ("TFLOP/s", "PFLOP/s", "GFLOP/s"))


@lru_cache(maxsize=4096)
def flops_text(flop: float) -> str:
    """The exact inverse of `parse_flops`."""
    return _exact_text(flop, _FLOP_UNITS, ("PFLOP", "TFLOP", "GFLOP", "MFLOP", "FLOP"))


def _rounded_text(number: int, units: tuple[tuple[str, int], ...]) -> str:
    """Four significant digits in the largest unit that gives at least 1."""
    for name, factor in units:
        digits = f"{number / factor:.4g}"
        if abs(float(digits)) >= 1 or factor == 1:
            return f"{float(digits):.10g} {name}"
    return f"{number} {units[-1][0]}"


def show_ns(ns: int) -> str:
    """A duration for people, four significant digits: 3216004 is `3.216 ms`."""
    return _rounded_text(ns, (("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1)))


def show_ns_range(low_ns: int, high_ns: int) -> str:
    """A range of durations; the unit is written once if both ends have it: `19.06–19.13 ms`."""
    low, high = show_ns(low_ns), show_ns(high_ns)
    number, _, unit = low.partition(" ")
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"


def show_bytes(nbytes: int) -> str:
    """A size for people, four significant digits: 4194304 is `4 MiB`."""
    return _rounded_text(
        nbytes, (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    )
