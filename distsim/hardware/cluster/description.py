"""A cluster as data: devices, links, network and fixed costs; from a preset's name or a mapping.

Files use readable units (``latency: 3 us``, ``bandwidth: 300 GB/s``). In memory, a duration is an
integer of ns, a size an integer of bytes, and a rate a float per ns (1 GB/s is 1 byte per ns). A
field's Python name includes its unit; its alias is the key in the file.

>>> preset("dgx-a100").intra.bytes_per_ns
300.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from distsim.common import units
from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.hardware.cluster.presets import CHANGED_SUFFIX, PRESETS

T = TypeVar("T")


def _unit_annotations(
    parse: Callable[[object], T], text: Callable[[T], str]
) -> tuple[BeforeValidator, PlainSerializer]:
    return BeforeValidator(parse), PlainSerializer(text, return_type=str)


_duration_reader, _duration_writer = _unit_annotations(units.parse_duration_ns, units.duration_text)
_size_reader, _size_writer = _unit_annotations(units.parse_size_bytes, units.size_text)
_bandwidth_reader, _bandwidth_writer = _unit_annotations(
    units.parse_bandwidth, units.bandwidth_text
)
_flop_rate_reader, _flop_rate_writer = _unit_annotations(
    units.parse_flop_rate, units.flop_rate_text
)

Duration = Annotated[int, _duration_reader, _duration_writer]
Size = Annotated[int, _size_reader, _size_writer]
Bandwidth = Annotated[float, _bandwidth_reader, _bandwidth_writer, Field(gt=0)]
FlopRate = Annotated[float, _flop_rate_reader, _flop_rate_writer, Field(gt=0)]
#: May exceed 1: in-network reduction beats the link's own bandwidth (NVLS: 1.07).
Efficiency = Annotated[float, Field(gt=0, le=2)]


class _ClusterPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    # Pydantic would take `true` for the number 1.
    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        if (
            isinstance(value, bool)
            and cls.model_fields[info.field_name or ""].annotation is not bool
        ):
            raise ValueError(f"expected a number, found {str(value).lower()}")
        return value


class ComputeDevice(_ClusterPart):
    """The device of one rank. ``peak`` is by torch's dtype name; an omitted dtype runs at the rate
    of ``float32``.
    """

    name: str = Field(description="Name of the device.", examples=["A100-80G"])
    peak: dict[str, FlopRate] = Field(
        description="Dense peak rate of each dtype; an omitted dtype has the rate of float32.",
        examples=[{"bfloat16": "312 TFLOP/s"}],
    )
    memory_bytes_per_ns: Bandwidth = Field(
        alias="memory_bandwidth",
        description=("Bandwidth of the device memory, from the data sheet."),
        examples=["2 TB/s"],
    )
    memory_nbytes: Size = Field(
        alias="memory_size", description="Size of the device memory.", examples=["80 GiB"]
    )
    #: Generation, by NCCL's tables: volta (V100), ampere (A100), ada (L4, L40S), hopper (H100,
    #: H200, GH200), blackwell (B200), cdna3 (MI300X). A new one also needs a row in these tables;
    #: without it, the value in brackets applies. In `distsim.hardware.cost`:
    #:
    #: - nccl_tuning: ``_LL_MAX``, ``_TREE_128`` (A100's bandwidths), ``_LL_MAX_ACROSS`` (the CPU's
    #:   limits), ``_CHANNELS`` (16), ``_BLOCK_CLUSTER_SIZE`` (1), ``NVLS_EFFICIENCY`` (no NVLS)
    #: - nccl_constants: ``BY_ARCHITECTURE`` (no offsets)
    #: - nccl_messages: ``_PEER_CHANNELS`` (H100's channels)
    #: - prediction_range: ``FITTED_SYSTEMS``, and ``_FITTED_ARCHITECTURES`` in
    #:   `distsim.hardware.cluster.presets` (the wider range, unless tables are published)
    architecture: Literal["volta", "ampere", "ada", "hopper", "blackwell", "cdna3", ""] = Field(
        default="",
        description="GPU generation; NCCL's choice of algorithms depends on it.",
        examples=["hopper"],
    )
    launch_ns: Duration = Field(
        default=0,
        alias="launch",
        description="Time from the host's call to the start of a kernel.",
        examples=["5 us"],
    )
    compute_efficiency: Efficiency = Field(
        default=1.0,
        description=("Share of the peak rate that large matrix products reach in a training step."),
        examples=[0.7],
    )
    memory_efficiency: Efficiency = Field(
        default=1.0,
        description="Share of the memory bandwidth that memory-bound kernels reach.",
        examples=[0.8],
    )
    overlap_compute: float = Field(
        default=1.0,
        ge=1,
        le=10,
        description="Slowdown factor of a kernel while its rank communicates.",
        examples=[1.19],
    )
    overlap_transfers: float = Field(
        default=1.0,
        ge=1,
        le=10,
        description="Slowdown factor of a transfer while one of its ranks computes.",
        examples=[1.1],
    )
    source: str = Field(default="", description="Source of the numbers.", examples=["data sheet"])

    def peak_flop_per_ns(self, dtype: str) -> float:
        """The data sheet's rate for a dtype, in FLOP per ns.

        A dtype without a rate runs at the rate of float32, because the device then computes in
        float32.
        """
        for name in (dtype, "float32"):
            rate = self.peak.get(name)
            if rate:
                return rate
        return min(self.peak.values(), default=1.0)

    def flop_per_ns(self, dtype: str) -> float:
        """Attainable rate for a dtype, in FLOP per ns."""
        return self.peak_flop_per_ns(dtype) * self.compute_efficiency


class IntraNodeLink(_ClusterPart):
    """The links between two ranks of a node; all numbers are per rank and direction."""

    kind: Literal["nvlink", "xgmi", "pcie", "shm"] = Field(
        description="Kind of link.", examples=["nvlink"]
    )
    latency_ns: Duration = Field(
        alias="latency",
        description=("Latency of one hop. With `collectives: nccl`, NCCL's own hop times apply."),
        examples=["3 us"],
    )
    bytes_per_ns: Bandwidth = Field(
        alias="bandwidth",
        description=(
            "Bandwidth of all links of a rank together, per direction, from the data sheet."
        ),
        examples=["300 GB/s"],
    )
    efficiency: Efficiency = Field(
        default=1.0,
        description=(
            "Share of the bandwidth that a ring reaches. With `collectives: "
            "nccl`, the share that NCCL assumes."
        ),
        examples=[0.8],
    )
    switch: bool = Field(
        default=True,
        description=(
            "Whether the links go to a switch (which can reduce, from H100 on). Otherwise they "
            "connect GPUs directly."
        ),
        examples=[True],
    )
    mesh: int | Literal["cube"] | None = Field(
        default=None,
        description=(
            "Number of ranks that are all directly connected, or `cube` for a DGX-1. A group of "
            "fewer ranks uses only its share of the links."
        ),
        examples=[8],
    )
    peer_access: bool = Field(
        default=True,
        description=(
            "Whether GPUs access each other over PCIe. Otherwise they stage data in host memory."
        ),
        examples=[True],
    )
    domain: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Number of ranks that these links join across nodes (NVL72: 72).",
        examples=[72],
    )
    per_switch: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description=(
            "Number of ranks behind one PCIe switch; they share its uplink [default: each slot "
            "has its own]."
        ),
        examples=[4],
    )
    source: str = Field(default="", description="Source of the numbers.", examples=["data sheet"])

    @field_validator("mesh")
    @classmethod
    def _two_or_more(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and not 2 <= value <= 1024:
            raise ValueError(f"expected a number of ranks from 2 to 1024, or cube, found {value}")
        return value

    @property
    def attained_bytes_per_ns(self) -> float:
        """Bandwidth that messages reach, in bytes per ns."""
        return self.bytes_per_ns * self.efficiency

    def reach(self, ranks: int) -> float:
        """Share of a rank's links that a group with ``ranks`` ranks on its node can use.

        Without a switch, only the links to ranks of the same group are usable.
        """
        if self.mesh is None or ranks < 2:
            return 1.0
        if self.mesh == "cube":
            return _CUBE_MESH_RINGS[min(ranks, 8)] / _CUBE_MESH_LINKS
        return min((ranks - 1) / (self.mesh - 1), 1.0)


#: The links of a rank in DGX-1's cube mesh (``nvidia-smi topo -m``: 4 inside its half of the
#: machine, 2 to the other).
_CUBE_MESH_LINKS = 6
#: DGX-1's cube mesh: how many one-way rings, of one link each, NCCL finds among the first N ranks.
#: For 5 and 7 ranks the number is an assumption: that of the next smaller group with rings.
_CUBE_MESH_RINGS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 2, 8: 6}


class NetworkCards(_ClusterPart):
    """The network cards of a node; ``bandwidth`` is one card's, per direction."""

    count: int = Field(
        default=1,
        ge=1,
        le=1024,
        description=(
            "Number of NICs per node. A rank uses the NIC with the index local_rank modulo `count`."
        ),
        examples=[8],
    )
    latency_ns: Duration = Field(
        default=0,
        alias="latency",
        description="Latency of one hop of one message through a NIC.",
        examples=["2 us"],
    )
    bytes_per_ns: Bandwidth = Field(
        alias="bandwidth", description="Bandwidth of one NIC, per direction.", examples=["25 GB/s"]
    )
    efficiency: Efficiency = Field(
        default=1.0,
        description=(
            "Share of the bandwidth that transfers reach. With "
            "`collectives: nccl`, the share that NCCL assumes."
        ),
        examples=[0.9],
    )
    source: str = Field(default="", description="Source of the numbers.", examples=["data sheet"])

    @property
    def attained_bytes_per_ns(self) -> float:
        """Bandwidth that messages reach over one card, in bytes per ns."""
        return self.bytes_per_ns * self.efficiency


class Network(_ClusterPart):
    """The network between the cards.

    With ``oversubscription`` 2, half of a node's card bandwidth is available at any time. With
    ``leaf``, the limit applies to a leaf switch instead: half of the card bandwidth of its nodes,
    shared by all transfers that leave it. ``reduces``: the switches can reduce (SHARP), and NCCL is
    configured to use them (CollNet).
    """

    latency_ns: Duration = Field(
        alias="latency", description="Latency of one hop between two NICs.", examples=["1 us"]
    )
    oversubscription: float = Field(
        default=1.0,
        ge=1,
        description=(
            "Oversubscription of the network; 2: half of a node's NIC bandwidth is available."
        ),
        examples=[1.0],
    )
    leaf: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description=(
            "Number of nodes on one leaf switch. `oversubscription` then applies to the uplink of "
            "that switch."
        ),
        examples=[16],
    )
    transport: Literal["ib", "roce", "efa", "slingshot", "tcpx", "tcpxo", "tcp"] = Field(
        default="ib",
        description="Transport of the NICs: `tcp` for plain Ethernet, `roce` with RDMA.",
        examples=["ib"],
    )
    reduces: bool = Field(
        default=False,
        description=("Whether the network switches reduce (SHARP) and NCCL uses them (CollNet)."),
        examples=[True],
    )
    source: str = Field(default="", description="Source of the numbers.", examples=["data sheet"])

    @property
    def single_card_divisor(self) -> float:
        """The factor that divides the bandwidth of a single card."""
        return self.oversubscription if self.leaf is None else 1.0


class MeasuredCurve(_ClusterPart):
    """Measured times of an operation by size, in place of computed ones.

    A time is measured from the arrival of the last rank to the end of the last rank, while all
    groups of the nodes call the operation at once.
    """

    op: str = Field(
        description="Operation; `send` represents all messages.", examples=["all_reduce"]
    )
    group: int = Field(ge=1, description="Number of ranks in each group.", examples=[8])
    ranks: int = Field(
        ge=1, description="Number of ranks per node, all active at once.", examples=[8]
    )
    nodes: int = Field(
        default=1, ge=1, description="Number of nodes that a group spans.", examples=[1]
    )
    times: dict[Size, Duration] = Field(
        description="Measured time by size in bytes, counted as nccl-tests does.",
        examples=[{"4 MiB": "100 us"}],
    )


class Cluster(_ClusterPart):
    """Everything that the cost model needs to know about the nodes and their network.

    The descriptions of the fields are the reference. In addition:

    * ``collectives``: ``nccl`` needs the device's ``architecture``
      (`distsim.hardware.cost.nccl_curves`). ``rails`` uses only latency and bandwidth: rings
      through every card, two-level algorithms, pipelined chains. ``flat`` uses the operation's
      schedule in the order of group ranks, as Gloo does.
    * ``shared_links``: see `distsim.hardware.cost.max_min_fairness`.
    * ``crossing``: how much a transfer slows down another transfer of the same process. At 1, two
      take twice as long; at 0, they are independent.
    * ``reduce_bandwidth``: None if the reduction is hidden behind transfers, as on a GPU.
    * ``algorithms``: all_gather and all_gather_into_tensor have the same effect, so they share an
      entry. See `distsim.hardware.cost`.
    * ``measured``: see `MeasuredCurve`.
    """

    name: str = Field(description="Name in reports.", examples=["our-pod"])
    source: str = Field(
        default="", description="Source of the numbers.", examples=["nccl-tests, 2026-03"]
    )
    error_band: str = Field(
        default="not measured",
        description="Uncertainty of predicted times; printed at the end of the report.",
        examples=["+-20 %"],
    )
    device: ComputeDevice = Field(
        description="Device of one rank.", examples=[{"memory_size": "80 GiB"}]
    )
    intra: IntraNodeLink = Field(
        description="Link between two ranks of one node, per rank and direction.",
        examples=[{"bandwidth": "300 GB/s"}],
    )
    nics: NetworkCards = Field(
        description="Network cards (NICs) of a node.", examples=[{"count": 8}]
    )
    network: Network = Field(
        description="Network between the NICs.", examples=[{"oversubscription": 2}]
    )
    call_overhead_ns: Duration = Field(
        default=0,
        alias="call_overhead",
        description=(
            "Time of a communication call before its first byte moves; the whole cost in "
            "a group of one."
        ),
        examples=["8 us"],
    )
    collectives: Literal["nccl", "rails", "flat"] = Field(
        default="rails",
        description=(
            "Cost model of collectives: NCCL's algorithms and protocols (`nccl`), all NICs in "
            "parallel (`rails`), or Gloo's algorithms (`flat`)."
        ),
        examples=["rails"],
    )
    gpus_per_process: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of GPUs per process. torch.distributed uses 1; nccl-tests has `-g`.",
        examples=[1],
    )
    host: Literal["intel", "amd", "arm"] = Field(
        default="intel",
        description="Vendor of the CPU; between nodes, NCCL's size limit for LL depends on it.",
        examples=["intel"],
    )
    algorithms: dict[str, str] = Field(
        default_factory=dict,
        description="Algorithm of each collective (such as all_reduce), or `cheapest`.",
        examples=[{"all_reduce": "ring"}],
    )
    shared_links: bool = Field(
        default=True,
        description=(
            "Whether concurrent transfers through one NIC or one rank's link share its bandwidth."
        ),
        examples=[True],
    )
    crossing: float = Field(
        default=0.0,
        ge=0,
        le=4,
        description=(
            "For `collectives: flat`: slowdown by each other transfer of the same process, from "
            "0 to 4 (1: two transfers take twice as long)."
        ),
        examples=[1.0],
    )
    reduce_bytes_per_ns: Bandwidth | None = Field(
        default=None,
        alias="reduce_bandwidth",
        description=(
            "Rate at which a CPU rank combines received data with its own data [default: "
            "hidden behind transfers]."
        ),
        examples=["5 GB/s"],
    )
    measured: tuple[MeasuredCurve, ...] = Field(
        default=(),
        description="Measured times by operation and size; `distsim calibrate` writes them.",
        examples=[[]],
    )

    def to_mapping(self) -> dict[str, object]:
        """The cluster as a file has it, in readable units.

        `cluster_from` turns the mapping back into an equal cluster.
        """
        data = self.model_dump(by_alias=True)
        for key in ("measured", "reduce_bandwidth", "algorithms"):
            if not data[key]:
                del data[key]
        return data

    @property
    def inter_latency_ns(self) -> int:
        """Latency of one hop between nodes."""
        return self.nics.latency_ns + self.network.latency_ns

    @property
    def rank_inter_bytes_per_ns(self) -> float:
        """Bandwidth of a single rank to another node.

        It is one card's, divided by an oversubscription that applies even without other traffic.
        """
        return self.nics.attained_bytes_per_ns / self.network.single_card_divisor

    @property
    def key(self) -> str:
        """A text that is the same for equal clusters."""
        return self.model_dump_json()


# --- clusters from names and mappings ---


_REMEDY = (
    "list the presets with `distsim clusters`, or write the cluster inline, such as `{preset: "
    "dgx-h100, nics: {count: 4}}`"
)
_TRANSPORT_REMEDY = "write `tcp` for plain Ethernet, `roce` for Ethernet with RDMA"


def preset(name: str) -> Cluster:
    """The preset of that name; raises UsageError, with the nearest name, if there is none."""
    return Cluster.model_validate(_preset_data(name))


def cluster_from(value: str | Mapping[str, object] | Cluster) -> Cluster:
    """A cluster from a preset's name or a mapping in readable units.

    The mapping is either complete, or has ``preset: NAME`` and overrides at any depth. Raises
    UsageError that names every wrong key.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, str):
        return preset(value)
    data = dict(value)
    base = data.pop("preset", None)
    if base is not None:
        merged = _merged(_preset_data(base), data)
        if data and "name" not in data:
            merged["name"] = f"{base}{CHANGED_SUFFIX}"
        if data and "error_band" not in data:
            merged["error_band"] = (
                f"{merged['error_band']}; the range is wider, because the preset was changed"
            )
        data = merged
    try:
        return Cluster.model_validate(data)
    except ValidationError as fault:
        raise UsageError(_validation_message(fault), _validation_remedy(fault)) from None


def _preset_data(name: object) -> dict[str, object]:
    if not isinstance(name, str) or name not in PRESETS:
        known = f"(known: {name_list(PRESETS)}){did_you_mean(name, PRESETS)}"
        raise UsageError(f"unknown cluster preset `{name}` {known}", _REMEDY)
    return PRESETS[name]


def _merged(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """``base`` overridden by ``changes``, recursively for nested mappings."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        merged[key] = value
    return merged


def _validation_message(fault: ValidationError) -> str:
    """One line per wrong key: ``cluster.intra.latency: expected …``."""
    lines = []
    for error in fault.errors(include_url=False):
        path = ".".join(["cluster", *(str(part) for part in error["loc"])])
        if error["type"] == "extra_forbidden":
            text = f"unknown key{did_you_mean(error['loc'][-1], _known_keys(error['loc'][:-1]))}"
        elif error["type"] == "missing":
            text = "this key is missing"
        elif error["type"] == "literal_error":
            text = f"unknown value `{error['input']}` (known: {error['ctx']['expected']})"
        else:
            text = str(error["msg"]).removeprefix("Value error, ")
        lines.append(f"{path}: {text}")
    return "\n".join(lines)


def _validation_remedy(fault: ValidationError) -> str:
    if any(error["loc"] == ("network", "transport") for error in fault.errors(include_url=False)):
        return _TRANSPORT_REMEDY
    return _REMEDY


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    """The valid keys of the mapping at this path of a cluster file."""
    parts: dict[str, type[ComputeDevice | IntraNodeLink | NetworkCards | Network]] = {
        "device": ComputeDevice,
        "intra": IntraNodeLink,
        "nics": NetworkCards,
        "network": Network,
    }
    model = parts.get(str(path[0]), Cluster) if path else Cluster
    keys = [info.alias or name for name, info in model.model_fields.items()]
    return keys if path else [*keys, "preset"]
