"""Files and folders that were given: read within bounds, recognised by what they hold, handed to
their readers.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters
from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import InputFile
from distsim.hang_doctor.model.reconcile import reconcile
from distsim.hang_doctor.readers import archives, ras, safe_pickle
from distsim.hang_doctor.readers.flight_recorder import is_flight_recorder, read_flight_recorder
from distsim.hang_doctor.readers.log_lines import LogReader
from distsim.hang_doctor.readers.nccl_debug import is_ras_text, read_ras_text
from distsim.hang_doctor.readers.stacks import is_pyspy_json, read_pyspy_json
from distsim.hang_doctor.readers.stale_files import drop_stale_ranks

#: Bytes of one file, and of one unpacked.
MAX_BYTES: Final = 128 << 20
_MAX_UNPACKED: Final = 64 << 20
#: Packed data that grows by more is no dump.
_MAX_GROWTH: Final = 120
_CHUNK_BYTES: Final = 1 << 14
_MAX_FILES: Final = 20_000
#: Objects and lists, and what they hold, of one JSON: each takes a hundred bytes once it is parsed.
_MAX_OBJECTS: Final = 3_000_000
_MAX_ITEMS: Final = 20_000_000
_MAX_LINE: Final = 20_000
_BOARD_BYTES: Final = 16 * 8 + 1024
_SKIPPED_SUFFIXES = (
    ".py",
    ".pyc",
    ".so",
    ".pt",
    ".bin",
    ".safetensors",
    ".png",
    ".svg",
    ".yaml",
    ".yml",
    ".lock",
)
_RANK = re.compile(r"(?:^|[^a-z])(?:global_?)?rank[_\-.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_ATTEMPT = re.compile(r"^(|.*?/)attempt_(\d{1,6})(?=/)")
#: What torchrun's agent writes between two starts of the workers.
_RESTART = re.compile(r"attempts left; will restart worker group")
_LAST_NUMBER = re.compile(r"(\d{1,7})(?:\.[A-Za-z]\w*)*$")


class FileRefused(Exception):
    """A file that is not read, and why."""


def read_evidence(paths: Sequence[str]) -> Evidence:
    """All that the files say. Raises UsageError for a path that is not there; a file that can't be
    read is listed with its problem.
    """
    evidence = Evidence()
    for path in _last_attempts(evidence, _list_files(paths)) if paths else ():
        shown = escape_control_characters(path, one_line=True)
        try:
            data = _file_bytes(path)
            members = (
                list(archives.archive_members(data)) if archives.is_archive(data) else [("", data)]
            )
        except (FileRefused, archives.ArchiveRefused) as refusal:
            evidence.files.append(InputFile(shown, "not read", (), str(refusal)))
        except OSError as fault:
            evidence.files.append(
                InputFile(shown, "not read", (), f"the system says: {fault.strerror}")
            )
        else:
            for name, part in members:
                _read_file(
                    evidence,
                    path,
                    part,
                    f"{shown}/{escape_control_characters(name, one_line=True)}" if name else shown,
                    name or path,
                )
    reconcile(evidence)
    drop_stale_ranks(evidence)
    return evidence


def _read_file(evidence: Evidence, path: str, data: bytes, shown: str, name: str) -> None:
    try:
        kind, ranks, problem = _read_by_content(evidence, path, data, shown, name)
    except FileRefused as refusal:
        kind, ranks, problem = "not read", set(), str(refusal)
    except RecursionError:
        kind, ranks, problem = "not read", set(), "it is nested too deeply"
    evidence.files.append(InputFile(shown, kind, tuple(sorted(ranks)), problem))


def _list_files(paths: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(
                f"there is no {escape_control_characters(path, one_line=True)}",
                "name dumps, logs and stacks, or the folder that holds them",
            )
        if os.path.isdir(path):
            inside = sorted(
                str(p)
                for p in Path(path).rglob("*")
                if p.is_file() and not p.name.startswith(".") and p.suffix not in _SKIPPED_SUFFIXES
            )
            found |= dict.fromkeys(inside)
        else:
            found[path] = None
    if not found:
        raise UsageError(
            f"nothing to read in {', '.join(escape_control_characters(p, one_line=True) for p in paths)}",
            "name dumps, logs and stacks",
        )
    if len(found) > _MAX_FILES:
        raise UsageError(
            f"{len(found)} files are more than {_MAX_FILES}", "name the folder of one job's dumps"
        )
    return list(found)


def _last_attempts(evidence: Evidence, files: list[str]) -> list[str]:
    """Torchrun keeps a folder ``attempt_N`` for each start of the workers. A hang is of the last
    one; the others are left out.
    """
    starts = {
        path: (found[1], int(found[2]))
        for path in files
        if (found := _ATTEMPT.search(path)) is not None
    }
    last: dict[str, int] = {}
    for folder, number in starts.values():
        last[folder] = max(last.get(folder, 0), number)
    for folder, number in sorted({start for start in starts.values() if start[1] < last[start[0]]}):
        evidence.add_note(
            f"{escape_control_characters(folder, one_line=True)}attempt_{number} is of an earlier start of the job, and left out: name it alone to "
            "look at it"
        )
    return [
        path for path in files if path not in starts or starts[path][1] == last[starts[path][0]]
    ]


def _read_by_content(
    evidence: Evidence, path: str, data: bytes, shown: str, name: str
) -> tuple[str, set[int], str]:
    rank = rank_of_file_name(name)
    if not data.strip():
        return "empty", set(), "nothing is in it"
    if len(data) == _BOARD_BYTES and (board := _parse_progress_file(data, rank)) is not None:
        ras.read_progress_file(evidence, board, shown)
        return "a distsim board", {board.rank}, ""
    if data[:1] == b"\x80" and data[1:2] in b"\x00\x01\x02\x03\x04\x05":
        return _read_pickle(evidence, data, rank, shown)
    head = data.lstrip()[:1]
    if head in (b"{", b"["):
        parsed = _parse_json(data)
        if parsed is not None:
            return _read_json(evidence, parsed, rank, path, shown)
        if b'"format": "distsim-trace"' in data[:200]:
            return _read_distsim_trace(evidence, path, shown)
    if other := _unrelated_bytes(data):
        return other, set(), ""
    if data.count(b"\0", 0, 4096) > 8:
        raise FileRefused("it is neither text nor a dump of plain data")
    return _read_text(evidence, data, rank, shown)


def _file_bytes(path: str) -> bytes:
    """What a file holds, unpacked; refused by its size before it is read."""
    status = os.stat(path)
    if not (
        stat.S_ISREG(status.st_mode)
        or stat.S_ISFIFO(status.st_mode)
        or stat.S_ISCHR(status.st_mode)
    ):
        raise FileRefused("it is no file")
    if status.st_size > MAX_BYTES:
        raise FileRefused(
            f"{status.st_size >> 20} MiB are more than the {MAX_BYTES >> 20} that a dump or a log may have; cut it: "
            "`grep -aE 'NCCL|Rank|rank[0-9]' LOG > short.log`"
        )
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise FileRefused(f"more than {MAX_BYTES >> 20} MiB came from it")
    if data[:2] == b"\x1f\x8b":
        return _gunzip(data)
    if data[:4] in (b"BZh9", b"\xfd7zX", b"\x28\xb5\x2f\xfd"):
        raise FileRefused("it is packed in a way that I do not read: unpack it")
    return data


def _gunzip(data: bytes) -> bytes:
    """Gzip, as far as it goes: a file that was cut gives what is whole. Refused where it grows
    beyond reason.
    """
    machine = zlib.decompressobj(31)
    parts, made = [], 0
    try:
        for start in range(0, len(data), _CHUNK_BYTES):
            bound = min(_MAX_UNPACKED, max((start + _CHUNK_BYTES) * _MAX_GROWTH, 1 << 20))
            parts.append(machine.decompress(data[start : start + _CHUNK_BYTES], bound - made + 1))
            made += len(parts[-1])
            if made > bound:
                raise FileRefused(
                    f"it unpacks to more than {bound >> 20} MiB from {(start + _CHUNK_BYTES) >> 10} KiB"
                )
    except zlib.error:
        raise FileRefused("it is damaged gzip") from None
    found = b"".join(parts)
    return found


def rank_of_file_name(path: str) -> int | None:
    """Whose file it is, by its name: ``nccl_trace_rank_3``, ``rank3.log``, ``stack.3.txt``; else by
    its folder, as torchrun lays logs.
    """
    name = os.path.basename(path)
    found = _RANK.search(name) or _LAST_NUMBER.search(
        re.sub(r"(\.(txt|log|json|gz|err|out|pickle|pkl|jsonl|dump|stack))+$", "", name)
    )
    if found is None and name in ("stdout.log", "stderr.log"):
        found = re.fullmatch(r"(\d{1,7})", os.path.basename(os.path.dirname(path)))
    return int(found[1]) if found and int(found[1]) < MAX_RANKS else None


def _parse_progress_file(data: bytes, rank: int | None) -> Any:
    from distsim.real.shared.progress_file import parse_snapshot

    if rank is None:
        return None
    try:
        return parse_snapshot(data, rank)
    except ValueError:
        return None


def _read_pickle(
    evidence: Evidence, data: bytes, rank: int | None, shown: str
) -> tuple[str, set[int], str]:
    try:
        found = safe_pickle.loads_plain(data)
    except safe_pickle.UnsafePickle as fault:
        raise FileRefused(f"this pickle is refused: {fault}") from None
    if not is_flight_recorder(found):
        raise FileRefused("this pickle is no Flight Recorder dump")
    return _read_flight_recorder(evidence, found, rank, shown)


def _read_flight_recorder(
    evidence: Evidence, found: dict[str, Any], rank: int | None, shown: str
) -> tuple[str, set[int], str]:
    if rank is None:
        raise FileRefused(
            "a Flight Recorder dump does not say whose it is, and its name has no rank: call it `…_rank_N`"
        )
    problem = read_flight_recorder(evidence, found, rank, shown)
    return (
        f"Flight Recorder {escape_control_characters(str(found['version'])[:12], one_line=True)}",
        {rank},
        problem,
    )


def _parse_json(data: bytes) -> Any:
    """JSON, with the missing comma of NCCL 2.28's RAS put in; None where it is none. Refused by its
    parts before it is parsed.
    """
    if data.count(b"{") + data.count(b"[") > _MAX_OBJECTS or data.count(b",") > _MAX_ITEMS:
        return _refuse_large_json(data)
    for repaired in (False, True):
        text = data.decode("utf-8", "replace")
        try:
            return json.loads(re.sub(r"\}(\s*)\{", r"},\1{", text) if repaired else text)
        except ValueError:
            if b'"communicators"' not in data[:4096]:
                return None
    return None


def _refuse_large_json(data: bytes) -> None:
    """None for a log whose first sign is a bracket. Refused otherwise: it is JSON of too many
    parts.
    """
    try:
        json.loads(data[:2048].decode("utf-8", "replace"))
    except json.JSONDecodeError as fault:
        if fault.pos < 16:
            return
    raise FileRefused(
        f"its JSON has more than {_MAX_OBJECTS} objects and lists, or {_MAX_ITEMS} items: keep the latest entries"
    )


def _read_json(
    evidence: Evidence, parsed: Any, rank: int | None, path: str, shown: str
) -> tuple[str, set[int], str]:
    if is_flight_recorder(parsed):
        return _read_flight_recorder(evidence, parsed, rank, shown)
    if is_pyspy_json(parsed):
        for stack in read_pyspy_json(parsed, shown):
            evidence.add_stack(rank, stack)
        return (
            "py-spy stacks",
            set() if rank is None else {rank},
            "" if rank is not None else "its name has no rank",
        )
    if ras.is_ras_json(parsed):
        return "NCCL RAS", ras.read_ras_json(evidence, parsed, shown), ""
    if ras.is_kineto(parsed):
        who = ras.read_kineto(evidence, parsed, rank, shown)
        return (
            "a Kineto trace",
            set() if who is None else {who},
            "" if who is not None else "it does not say which rank it is from",
        )
    if isinstance(parsed, dict) and parsed.get("format") == "distsim-trace":
        return _read_distsim_trace(evidence, path, shown)
    return _read_dumps_of_ranks(evidence, parsed, shown)


def _read_dumps_of_ranks(evidence: Evidence, parsed: Any, shown: str) -> tuple[str, set[int], str]:
    """Dumps of many ranks in one file: a list in order of ranks, or an object by rank."""
    if other := _unrelated_json(parsed):
        return other, set(), ""
    items: Iterable[tuple[Any, Any]] = (
        enumerate(parsed) if isinstance(parsed, list) else parsed.items()
    )
    ranks = set()
    for key, item in items:
        number = re.fullmatch(r"(?:rank[_ ]?)?(\d{1,6})", str(key))
        if is_flight_recorder(item) and number is not None:
            read_flight_recorder(evidence, item, int(number[1]), f"{shown}#{key}")
            ranks.add(int(number[1]))
    if not ranks:
        raise FileRefused(
            "it is JSON, and none that I know: no Flight Recorder dump, py-spy, RAS or Kineto"
        )
    return "Flight Recorder", ranks, ""


def _read_distsim_trace(evidence: Evidence, path: str, shown: str) -> tuple[str, set[int], str]:
    from distsim.trace.jsonl import read_trace

    try:
        trace = read_trace(path)
    except UsageError as refusal:
        raise FileRefused(refusal.message) from None
    cut = trace.header.get("cut")  # a recording whose writer was killed: what is whole of it
    problem = f"cut: read up to line {cut['read'] + 1}, its last whole one" if cut else ""
    return "a distsim trace", ras.read_distsim_trace(evidence, trace, shown), problem


def _read_text(
    evidence: Evidence, data: bytes, rank: int | None, shown: str
) -> tuple[str, set[int], str]:
    text = data.decode("utf-8", "replace")
    lines = text.split("\n")
    if (
        start := max((at + 1 for at, line in enumerate(lines) if _RESTART.search(line)), default=0)
    ) > 0:
        evidence.add_note(
            f"{shown} has several starts of the job: read from line {start + 1} on, after the last restart"
        )
        lines = lines[start:]
    reader = LogReader(evidence, shown, rank)
    reader.read(line[:_MAX_LINE] for line in lines)
    if is_ras_text(text):
        reader.ranks |= read_ras_text(evidence, lines, shown)
        reader.found.add("an NCCL RAS report")
    if not reader.found and (other := _unrelated_text(text)):
        return other, set(), ""
    if not reader.found:
        return "text", reader.ranks, "no line of torch or NCCL, no stack and no error is in it"
    return ", ".join(sorted(reader.found)), reader.ranks, ""


# --- files of the trade that tell nothing of a hang, so that nobody wonders whether they were understood ---
#: What a file begins with -> what it is. Chakra's traces are protobuf: a message's length, then its
#: `version` or first attribute.
_UNRELATED_TEXTS: Final = (
    (re.compile(r"^# +nThreads? |^# nccl-tests", re.MULTILINE), "results of nccl-tests"),
    (re.compile(r"\A\s*<algo [^>]*\bcoll="), "an algorithm of MSCCL"),
    (re.compile(r"\A\S+ +model_parallel_NPU_group: *\d"), "a workload of SimAI"),
    (re.compile(r"\Atest\s*\n\w+:\s*\nallreduce,:", re.MULTILINE), "bandwidths of SimAI"),
    (
        re.compile(r"\A(?=(?s:.*)^npus_count:)(?=(?s:.*)^topology:)", re.MULTILINE),
        "a network of ASTRA-sim",
    ),
    (
        re.compile(r"\A(?=(?s:.*)^world:)(?=(?s:.*)^program:)", re.MULTILINE),
        "a scenario of distsim",
    ),
    (
        re.compile(
            r"\A(,*\d+(F|B|I|W|BW|SEND_\w|RECV_\w|UNSHARD|RESHARD)\d*)(,(\d+[A-Z_]+\d*|\([^)]*\)\w+)?){3}"
        ),
        "a schedule of a pipeline",
    ),
)
_CHAKRA: Final = re.compile(
    rb"\A[\x80-\xff]{0,3}[\x01-\x7f](\x0a[\x05-\x08]\d+\.\d+\.\d|\x12.\x0a\x06schema)", re.DOTALL
)


def _unrelated_text(text: str) -> str:
    """What a text is that is no evidence; empty where that is not known."""
    head = text[:4096]
    return next(
        (
            f"{what}, which tells nothing of a hang"
            for pattern, what in _UNRELATED_TEXTS
            if pattern.search(head)
        ),
        "",
    )


def _unrelated_bytes(data: bytes) -> str:
    """The same for what is no text."""
    return (
        "an execution trace of Chakra, which tells nothing of a hang"
        if _CHAKRA.match(data[:96])
        else ""
    )


def _unrelated_json(parsed: object) -> str:
    """The same for JSON."""
    if not isinstance(parsed, Mapping):
        return ""
    if isinstance(parsed.get("nodes"), list) and "schema" in parsed:
        return "a PyTorch execution trace, which tells nothing of a hang"
    if "scheduling-policy" in parsed and "all-reduce-implementation" in parsed:
        return "a system of ASTRA-sim, which tells nothing of a hang"
    if any(str(key).startswith("pytorch.wait_counter") for key in parsed):
        return "torch's wait counters, which name no call"
    return ""
