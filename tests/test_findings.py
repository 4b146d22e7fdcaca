"""The table of finding codes: closed, ordered, explained, and true to what the checks say."""

from __future__ import annotations

import re

import pytest

from distsim.check.backends import backend_findings
from distsim.check.names import name_swaps
from distsim.check.verdict import verdict_of
from distsim.findings.codes import CODES, explain
from distsim.findings.record import Finding
from distsim.profiles import PROFILES
from distsim.program.lower import lower
from distsim.scenario import loads

#: Codes whose checks come with the exploration of orders, the races and the timeouts.
LATER = {"DS401", "DS402", "DS403", "DS705", "DS804"}


def findings(text: str) -> tuple[Finding, ...]:
    """All that the checks say of a scenario."""
    program = lower(loads(text))
    return (*verdict_of(program).findings, *name_swaps(program), *backend_findings(program, PROFILES[program.backend]))


def test_codes_are_in_order_and_their_group_gives_their_verdict() -> None:
    classes = {"1": "invalid", "2": "mismatch", "3": "deadlock", "4": "race", "5": "leak"}

    assert list(CODES) == sorted(CODES)
    assert all(re.fullmatch(r"DS[1-9]\d\d", code) for code in CODES)
    assert {code: info.verdict for code, info in CODES.items()} == {code: classes.get(code[2]) for code in CODES}


def test_every_code_of_a_class_but_a_leak_is_an_error() -> None:
    assert {i.code for i in CODES.values() if i.verdict not in (None, "leak") and i.severity != "error"} == set()


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_page_of_eighty_columns(code: str) -> None:
    page = explain(code)

    assert page.startswith(f"{code}  {CODES[code].title}\n")
    assert all(word in page for word in ("What it is", "What happens", "What to do", "A scenario that has it"))
    assert max(len(line) for line in page.partition("A scenario")[0].splitlines()) <= 80


@pytest.mark.parametrize("code", [code for code in CODES if code not in LATER])
def test_the_example_of_a_code_has_its_finding(code: str) -> None:
    """The page's own scenario is read, lowered and checked; the finding has the severity that the page states."""
    found = [f for f in findings(CODES[code].example) if f.code == code]

    assert found
    assert {f.severity for f in found} == {CODES[code].severity}
    assert all(f.message and f.message[0] != " " for f in found)


@pytest.mark.parametrize("code", sorted(LATER))
def test_the_example_of_a_later_code_can_be_read(code: str) -> None:
    assert lower(loads(CODES[code].example)).world_size >= 2


#: code -> what to change in its example so that the finding is gone: (old text, new text) pairs.
REPAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "DS101": (("send: {tensor: x, dst: rank + 1}", "{send: {tensor: x, dst: rank + 1}, ranks: 0}"),),
    "DS102": (("dst: 0", "dst: 1"),),
    "DS103": (("src: 0", "group_src: 0"),),
    "DS104": (("all_reduce: {tensor: x, group: hi}", "{all_reduce: {tensor: x, group: hi}, ranks: rank >= 2}"),),
    "DS105": (("  - {wait: h, ranks: 0}\n  - {wait: h, ranks: 0}\n", "  - {wait: h, ranks: 0}\n"),),
    "DS106": (("- wait: h", "- {wait: h, ranks: 0}"),),
    "DS107": (("[1, 2]", "[2, 2]"),),
    "DS108": (("  - destroy_process_group\n  - barrier\n", "  - barrier\n  - destroy_process_group\n"),),
    "DS109": (("  - init_process_group\n  - init_process_group\n", "  - init_process_group\n"),),
    "DS110": (("shape: [4]}}\n", "shape: [8]}}\n"),),
    "DS111": (("[0, 2]", "[0, 1]"),),
    "DS112": (("tag: -1", "tag: 1"),),
    "DS201": (("broadcast: {tensor: x, src: 0}", "all_reduce: {tensor: x}"),),
    "DS202": (("tensor: y", "tensor: x"),),
    "DS203": (("int32", "float32"),),
    "DS204": (("max", "sum"),),
    "DS205": (("src: rank", "src: 0"),),
    "DS206": (("  - {all_reduce: {tensor: x}, ranks: 0}\n", "  - {all_reduce: {tensor: x}, ranks: [0, 1]}\n"),
              ("  - {all_reduce: {tensor: x}, ranks: 1}\n", "")),
    "DS207": (("1: [2, 2]", "1: [3, 1]"),),
    "DS208": (("tensor: y", "tensor: z"),),
    "DS209": (("int32", "float32"),),
    "DS210": (("ranks: [1]}", "ranks: [0, 1]}"),),
    "DS301": (("  - send: {tensor: x, dst: 1 - rank}\n", "  - {send: {tensor: x, dst: 1}, ranks: 0}\n"),
              ("  - recv: {tensor: z, src: 1 - rank}\n", "  - {recv: {tensor: z, src: 0}, ranks: 1}\n")),
    "DS302": (("{barrier: {}, ranks: 0}", "barrier"),),
    "DS303": (("  - {fail: {message: out of memory}, ranks: 0}\n", ""),),
    "DS304": (("tag: 2", "tag: 1"),),
    "DS305": (("  - {recv: {tensor: x}, ranks: 0}\n", ""), ("ranks: 1}\n  - {send", "ranks: 0}\n  - {send")),
    "DS501": (("dst: 1}, ranks: 0}\n", "dst: 1, as: h}, ranks: 0}\n  - {wait: h, ranks: 0}\n"),),
    "DS502": (("ranks: 0}\n", "ranks: 0}\n  - {recv: {tensor: x, src: 0}, ranks: 1}\n"),),
    "DS601": (("  - {all_reduce: {tensor: x}, ranks: 0}\n", "  - all_reduce: {tensor: x}\n"),
              ("  - {all_reduce: {tensor: x}, ranks: 1}\n", "")),
    "DS602": (("src: 0, tag: 2", "src: 0, tag: 3"), ("src: 0, tag: 1", "src: 0, tag: 2"), ("src: 0, tag: 3", "src: 0, tag: 1")),
    "DS603": (("send: {tensor: x, dst: 1 - rank}", "{send: {tensor: x, dst: 1}, ranks: 0}"),
              ("recv: {tensor: x, src: 1 - rank}", "{recv: {tensor: x, src: 0}, ranks: 1}")),
    "DS605": (("ranks: rank > 0", "ranks: 1"),),
    "DS701": (("backend: nccl", "backend: gloo"),),
    "DS702": (("complex64", "float32"),),
    "DS703": (("band", "sum"),),
    "DS704": (("monitored_barrier", "barrier"),),
    "DS801": (("kind: kill", "kind: raise"),),
    "DS802": (("  - {fail: {message: out of memory}, ranks: 0}\n", "  - barrier\n"),),
    "DS803": (("code: 1", "code: 0"),),
    "DS805": (("kind: absent", "kind: kill, before_call: 0"),),
    "DS901": (("rank == 7", "rank <= 7"),),
    "DS902": (("{recv: {tensor: x}, ranks: 0}", "barrier"),),
}  # fmt: skip


def test_every_code_that_is_checked_has_a_repair() -> None:
    assert set(REPAIRS) == set(CODES) - LATER


@pytest.mark.parametrize("code", REPAIRS)
def test_the_repaired_example_has_the_finding_no_more(code: str) -> None:
    text = CODES[code].example
    for old, new in REPAIRS[code]:
        assert old in text
        text = text.replace(old, new)

    assert code not in [f.code for f in findings(text)]


def test_an_unknown_code_is_answered_with_the_nearest() -> None:
    with pytest.raises(KeyError, match="did you mean DS301"):
        explain("DS3O1")
