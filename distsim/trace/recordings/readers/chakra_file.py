"""Files of Chakra execution traces (`.et`): the nodes of one rank.

A file is a sequence of protobuf messages, each behind its length as a varint: a `GlobalMetadata`,
then a `Node` for each operation. It may be compressed with gzip. The schema is
`schema/protobuf/et_def.proto` of mlcommons/chakra (21585d8f, version 0.0.4); `_MESSAGES` has the
fields that are read here. Library `protobuf` decodes the messages and skips all other fields.

The attributes are those that Chakra's converter and feeder use: ``is_cpu_op``, ``stream``, ``tid``,
``comm_type``, ``comm_size`` (bytes), ``comm_src``, ``comm_dst``, ``comm_tag``, ``pg_name``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from distsim.common.errors import EnvironmentFault, UsageError, raise_if_out_of_memory
from distsim.common.file_io import escape_control_characters
from distsim.common.installation import install_command
from distsim.trace.recordings.readers.file_content import read_content

SUFFIXES = (".et", ".et.gz")
_RANK_IN_NAME = re.compile(r"(?:[._-]|rank[._-]?)(\d{1,18})\.et(?:\.gz)?$", re.IGNORECASE)
_MAX_RANKS = 1 << 17
#: Longer times are damage. Some traces count from 1970.
_LATEST_US = 4_000_000_000_000_000
_MAX_NUMBER = 1 << 53
_LONGEST_NAME = 200
_LONGEST_VARINT = 10
_REMEDY = "convert the trace again with `chakra_converter`"

NodeKind = Literal["work", "send", "recv", "collective", "none"]
#: `NodeType` of the schema. Metadata nodes take no time, but others may depend on them.
_KINDS: Mapping[int, NodeKind] = {
    1: "none",
    2: "work",
    3: "work",
    4: "work",
    5: "send",
    6: "recv",
    7: "collective",
}
#: Message -> its fields: (name, number, type, repeated). Types are those of `FieldDescriptorProto`.
_MESSAGES: Mapping[str, tuple[tuple[str, int, str, bool], ...]] = {
    "Attribute": (
        ("name", 1, "STRING", False),
        ("double_val", 3, "DOUBLE", False),
        ("float_val", 5, "FLOAT", False),
        ("int32_val", 7, "INT32", False),
        ("int64_val", 9, "INT64", False),
        ("uint32_val", 11, "UINT32", False),
        ("uint64_val", 13, "UINT64", False),
        ("sint32_val", 15, "SINT32", False),
        ("sint64_val", 17, "SINT64", False),
        ("fixed32_val", 19, "FIXED32", False),
        ("fixed64_val", 21, "FIXED64", False),
        ("sfixed32_val", 23, "SFIXED32", False),
        ("sfixed64_val", 25, "SFIXED64", False),
        ("bool_val", 27, "BOOL", False),
        ("string_val", 29, "BYTES", False),
    ),
    "Metadata": (("version", 1, "BYTES", False), ("attr", 2, "MESSAGE", True)),
    "Node": (
        ("id", 1, "UINT64", False),
        ("name", 2, "BYTES", False),
        ("type", 3, "INT32", False),
        ("ctrl_deps", 4, "UINT64", True),
        ("data_deps", 5, "UINT64", True),
        ("start_time_micros", 6, "UINT64", False),
        ("duration_micros", 7, "UINT64", False),
        ("attr", 10, "MESSAGE", True),
    ),
}


class ChakraNode(NamedTuple):
    """One operation of a rank. Times are in ns; ``start_ns`` is 0 if it is not recorded.

    ``on_host``: whether the CPU runs it. ``stream``: of the device, or the thread of the host; -1
    if unknown. ``comm_type``: the number of the collective, -1 if it is not named. ``peer``: the
    other rank of a message, -1 if unknown.
    """

    number: int
    name: str
    kind: NodeKind
    data_deps: tuple[int, ...]
    ctrl_deps: tuple[int, ...]
    start_ns: int
    duration_ns: int
    on_host: bool
    stream: int
    comm_type: int
    nbytes: int
    peer: int
    tag: int
    group: str


class ChakraFile(NamedTuple):
    """The trace of one rank, in the order of the file."""

    file: str
    rank: int
    nodes: list[ChakraNode]


def is_chakra_name(path: Path) -> bool:
    """Whether the file's name is that of a Chakra trace."""
    return path.name.lower().endswith(SUFFIXES)


def read_chakra_file(path: Path) -> ChakraFile:
    """Read one file. Raises UsageError if it is too large, damaged, or no Chakra trace."""
    rank = _rank_of(path)
    types = _message_types(str(path))
    messages = _messages(read_content(path, "trace fewer steps"), path)
    metadata = types["Metadata"]()
    first = next(messages, None)
    if first is None or not _is_decoded(metadata, first) or not _looks_right(metadata):
        raise UsageError(
            f"{path}: no Chakra execution trace (it has no metadata with a version or a schema)",
            "give the .et files that `chakra_converter` writes, one per rank",
        )
    nodes: list[ChakraNode] = []
    numbers: set[int] = set()
    for message in messages:
        node = types["Node"]()
        if not _is_decoded(node, message):
            raise UsageError(
                f"{path}: damaged Chakra trace (node {len(nodes) + 1} is unreadable)", _REMEDY
            )
        if node.id in numbers:
            raise UsageError(f"{path}: damaged Chakra trace (two nodes {node.id})", _REMEDY)
        numbers.add(node.id)
        nodes.append(_node(node, path))
    if not nodes:
        raise UsageError(f"{path}: this Chakra trace contains no nodes", _REMEDY)
    return ChakraFile(str(path), rank, nodes)


def _rank_of(path: Path) -> int:
    match = _RANK_IN_NAME.search(path.name)
    if match is not None and int(match[1]) < _MAX_RANKS:
        return int(match[1])
    raise UsageError(
        f"{path}: Chakra trace without a rank in its name", "name the file <job>.<rank>.et"
    )


# --- messages ---


@cache
def _message_types(file: str) -> Mapping[str, Any]:
    """The classes of the messages. Raises EnvironmentFault if protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise_if_out_of_memory(error)
        raise EnvironmentFault(
            f"{file}: protobuf is not installed, which reads Chakra traces",
            install_command("chakra"),
        ) from None
    schema = descriptor_pb2.FileDescriptorProto(name="chakra.proto", package="distsim_chakra")
    schema.syntax = "proto3"
    for message_name, fields in _MESSAGES.items():
        message = schema.message_type.add(name=message_name)
        for name, number, kind, is_repeated in fields:
            field = message.field.add(name=name, number=number)
            field.type = getattr(field, f"TYPE_{kind}")
            field.label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            if kind == "MESSAGE":
                field.type_name = ".distsim_chakra.Attribute"
    # A pool of its own: the default one may hold Chakra's own classes.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"distsim_chakra.{name}"))
        for name in _MESSAGES
    }


def _is_decoded(message: Any, content: bytes) -> bool:
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(content)
    except DecodeError:
        return False
    return True


def _looks_right(metadata: Any) -> bool:
    """Whether a first message is that of a Chakra trace, and not of any other protobuf file."""
    has_version = re.fullmatch(rb"\d+\.\d[\w.-]*", metadata.version) is not None
    return has_version or any(attribute.name == "schema" for attribute in metadata.attr)


def _messages(content: bytes, path: Path) -> Iterator[bytes]:
    """The messages of a file. Raises UsageError if the last one is cut off."""
    position = count = 0
    while position < len(content):
        length, begin = _varint(content, position)
        position = begin + length
        if length < 0 or position > len(content):
            raise UsageError(
                f"{path}: no Chakra execution trace, or cut off after {max(count - 1, 0)} nodes",
                "copy the file again, or convert it again with `chakra_converter`",
            )
        count += 1
        yield content[begin:position]


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """A number and the position behind it; -1 if the content ends within the number."""
    value = 0
    for index, byte in enumerate(content[position : position + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    return -1, position


# --- nodes ---


def _node(message: Any, path: Path) -> ChakraNode:
    attributes = {attribute.name: _value(attribute) for attribute in message.attr}
    on_host = attributes.get("is_cpu_op") is True or attributes.get("is_cpu_op") == 1
    kind = _KINDS.get(message.type, "work")
    comm_type = _number(attributes.get("comm_type"), -1)
    if kind == "collective" and on_host and "comm_type" not in attributes:
        # The host's call that launches a collective has the type of the collective, too.
        kind = "work"
    stream = attributes.get("tid" if on_host else "stream", attributes.get("tid"))
    return ChakraNode(
        message.id,
        _text(message.name),
        kind,
        tuple(message.data_deps),
        tuple(message.ctrl_deps),
        _nanoseconds(message, "start_time_micros", path),
        _nanoseconds(message, "duration_micros", path),
        on_host,
        _number(stream, -1),
        comm_type,
        _number(attributes.get("comm_size"), 0),
        _number(attributes.get("comm_dst" if kind == "send" else "comm_src"), -1),
        _number(attributes.get("comm_tag"), 0),
        str(attributes.get("pg_name", "")),
    )


def _value(attribute: Any) -> Any:
    """The value of an attribute, which is in the field of its type; 0 if that holds a zero."""
    for field, value in attribute.ListFields():
        if field.name != "name":
            return _text(value) if isinstance(value, bytes) else value
    return 0


def _text(content: bytes) -> str:
    text = content[:_LONGEST_NAME].decode("utf-8", "replace")
    return escape_control_characters(text, one_line=True)


def _number(value: object, default: int) -> int:
    """A whole number from 0; anything else gives the default."""
    if isinstance(value, int | float) and 0 <= value < _MAX_NUMBER:
        return int(value)
    return default


def _nanoseconds(message: Any, field: str, path: Path) -> int:
    microseconds = int(getattr(message, field))
    if microseconds > _LATEST_US:
        raise UsageError(
            f"{path}: node {message.id} has {field} {microseconds}, which is no time", _REMEDY
        )
    return microseconds * 1000
