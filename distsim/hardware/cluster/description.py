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
from distsim.hardware.cluster.presets import PRESETS

T = TypeVar("T")


def _unit_annotations(
    parse: Callable[[object], T], text: Callable[[T], str]
) -> tuple[BeforeValidator, PlainSerializer]:
    return BeforeValidator(parse), PlainSerializer(text, return_type=str)


_parse_duration, _duration_text = _unit_annotations(units.parse_duration_ns, units.duration_text)
_parse_size, _size_text = _unit_annotations(units.parse_size_bytes, units.size_text)
_parse_bandwidth, _bandwidth_text = _unit_annotations(units.parse_bandwidth, units.bandwidth_text)
_parse_flop_rate, _flop_rate_text = _unit_annotations(units.parse_flop_rate, units.flop_rate_text)

Duration = Annotated[int, _parse_duration, _duration_text]
Size = Annotated[int, _parse_size, _size_text]
Bandwidth = Annotated[float, _parse_bandwidth, _bandwidth_text, Field(gt=0)]
FlopRate = Annotated[float, _parse_flop_rate, _flop_rate_text, Field(gt=0)]
#: May exceed 1: in-network reduction beats the link's own bandwidth (NVLS: 1.07).
Efficiency = Annotated[float, Field(gt=0, le=2)]


class _ClusterPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

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
    """What one rank computes on. ``peak`` is by torch's dtype name; a dtype left out runs at
    ``float32``'s rate.
    """

    name: str
    peak: dict[str, FlopRate]
    memory_bytes_per_ns: Bandwidth = Field(alias="memory_bandwidth")
    memory_nbytes: Size = Field(alias="memory_size")
    #: Generation, by NCCL's tables: volta (V100), ampere (A100), ada (L4, L40S), hopper (H100,
    #: H200, GH200), blackwell (B200), cdna3 (MI300X).
    architecture: Literal["volta", "ampere", "ada", "hopper", "blackwell", "cdna3", ""] = ""
    launch_ns: Duration = Field(default=0, alias="launch")  # one kernel
    compute_efficiency: Efficiency = 1.0  # share of peak that a large matrix product reaches
    memory_efficiency: Efficiency = 1.0
    #: Factor by which a kernel is slower while its rank communicates.
    overlap_compute: float = Field(default=1.0, ge=1, le=10)
    #: Factor by which a transfer's bytes move slower while one of its ranks computes.
    overlap_transfers: float = Field(default=1.0, ge=1, le=10)
    source: str = ""

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
    """The way between two ranks of a node: per rank and direction. ``latency`` is one hop, one
    message.
    """

    kind: Literal["nvlink", "xgmi", "pcie", "shm"]
    latency_ns: Duration = Field(alias="latency")
    bytes_per_ns: Bandwidth = Field(alias="bandwidth")
    #: Share of the data sheet's bandwidth that a ring reaches. With ``collectives: nccl``: the
    #: share that NCCL assumes.
    efficiency: Efficiency = 1.0
    #: True if the links meet in a switch (which can reduce from H100 on); False if they connect
    #: pairs of GPUs directly.
    switch: bool = True
    #: Number of ranks in a full mesh of equal links, or DGX-1's cube mesh.
    mesh: int | Literal["cube"] | None = Field(default=None)
    #: False if GPUs cannot reach each other over PCIe and stage data through host memory.
    peer_access: bool = True
    #: Ranks that these links connect across machines (NVL72: 72).
    domain: int | None = Field(default=None, ge=1, le=1 << 20)
    #: Ranks behind one PCIe switch; they share its uplink.
    per_switch: int | None = Field(default=None, ge=1, le=1024)
    source: str = ""

    @field_validator("mesh")
    @classmethod
    def _two_or_more(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and not 2 <= value <= 1024:
            raise ValueError(f"expected 2 to 1024 ranks or cube, found {value}")
        return value

    @property
    def attained(self) -> float:
        """Bandwidth that messages reach, in bytes per ns."""
        return self.bytes_per_ns * self.efficiency

    def reach(self, ranks: int) -> float:
        """Share of a rank's links that a group with ``ranks`` ranks on its node can use.

        Without a switch, only the links to ranks of the same group are usable.
        """
        if self.mesh is None or ranks < 2:
            return 1.0
        if self.mesh == "cube":
            return _CUBE_MESH_RINGS[min(ranks, 8)] / 6
        return min((ranks - 1) / (self.mesh - 1), 1.0)


#: DGX-1's cube mesh: how many one-way rings, of one link each, NCCL finds among the first N ranks.
#: A rank has 6 links (``nvidia-smi topo -m``: 4 inside its half of the machine, 2 to the other).
#: For 5 and 7 ranks the number is an assumption: that of the next smaller group with rings.
_CUBE_MESH_RINGS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 2, 8: 6}


class NetworkCards(_ClusterPart):
    """The network cards of a node; ``bandwidth`` is one card's, per direction."""

    count: int = Field(default=1, ge=1, le=1024)
    latency_ns: Duration = Field(default=0, alias="latency")
    bytes_per_ns: Bandwidth = Field(alias="bandwidth")
    efficiency: Efficiency = 1.0
    source: str = ""

    @property
    def attained(self) -> float:
        """Bandwidth that messages reach over one card, in bytes per ns."""
        return self.bytes_per_ns * self.efficiency


class Network(_ClusterPart):
    """What lies between the cards. ``oversubscription`` 2: half of a node's card bandwidth gets
    through, always; where ``leaf`` tells how many machines are on a leaf switch, half of what their
    cards could send gets out of it, shared by all that leaves it at once. ``reduces``: its switches
    can reduce (SHARP), and NCCL is told to use that (CollNet)."""

    latency_ns: Duration = Field(alias="latency")
    oversubscription: float = Field(default=1.0, ge=1)
    leaf: int | None = Field(default=None, ge=1, le=1 << 20)
    transport: Literal["ib", "roce", "efa", "slingshot", "tcpx", "tcpxo", "tcp"] = "ib"
    reduces: bool = False
    source: str = ""

    @property
    def narrowed(self) -> float:
        """The factor that divides the bandwidth of a single card."""
        return self.oversubscription if self.leaf is None else 1.0


class MeasuredCurve(_ClusterPart):
    """Measured: how long an operation takes, by its bytes as nccl-tests counts them, from the last
    rank's arrival to the last one's end.

    ``group`` ranks in each group, ``ranks`` on each node, all of them busy at once; ``nodes`` that
    a group spans. ``send`` stands for every message.
    """

    op: str
    group: int = Field(ge=1)
    ranks: int = Field(ge=1)
    nodes: int = Field(default=1, ge=1)
    times: dict[Size, Duration]


class Cluster(_ClusterPart):
    """Everything a cost model needs to know about the machines.

    ``call_overhead``: what a communication call costs before its first byte moves (a kernel, a
    protocol's start). ``collectives``: ``nccl`` by NCCL's algorithms and protocols,
    `distsim.hardware.cost.nccl_curves` (needs the device's ``architecture``); ``rails`` by latency
    and bandwidth alone (rings through every card, two-level algorithms, pipelined chains), ``flat``
    as Gloo does (the row's schedule in the order of group ranks). ``gpus_per_process``: how many
    GPUs one process drives; torch.distributed drives one (nccl-tests' ``-g``). ``host``: the CPU's
    maker, by which NCCL chooses between nodes. ``shared_links``: transfers that cross a rank's link
    or a card at the same time share it, see `distsim.hardware.cost.max_min_fairness`. ``crossing``:
    on flat clusters with shared links, by how much of its moving time a transfer hinders another
    that the same process moves: at 1 two take twice as long, at 0 they do not hinder each other.
    ``reduce_bandwidth``: at which a rank combines what came with what it has, on a CPU (None:
    hidden behind transfers, as on a GPU). ``algorithms``: by what they bring about (all_gather and
    all_gather_into_tensor are one), the algorithm that is priced, or ``cheapest``; see
    `distsim.hardware.cost`. ``measured``: see `MeasuredCurve`.
    """

    name: str
    source: str = ""
    error_band: str = "not measured"
    device: ComputeDevice
    intra: IntraNodeLink
    nics: NetworkCards
    network: Network
    call_overhead_ns: Duration = Field(default=0, alias="call_overhead")
    collectives: Literal["nccl", "rails", "flat"] = "rails"
    gpus_per_process: int = Field(default=1, ge=1, le=64)
    host: Literal["intel", "amd", "arm"] = "intel"
    algorithms: dict[str, str] = Field(default_factory=dict)
    shared_links: bool = True
    crossing: float = Field(default=0.0, ge=0, le=4)
    reduce_bytes_per_ns: Bandwidth | None = Field(default=None, alias="reduce_bandwidth")
    measured: tuple[MeasuredCurve, ...] = ()

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
        return self.nics.attained / self.network.narrowed

    @property
    def key(self) -> str:
        """A text that is the same for equal clusters."""
        return self.model_dump_json()


# --- clusters from names and mappings ---


_REMEDY = (
    "`distsim clusters` lists the presets; a cluster may also be written inline, "
    "as `{preset: dgx-h100, nics: {count: 4}}`"
)


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
            merged["name"] = f"{base}, changed"
        if data and "error_band" not in data:
            merged["error_band"] = f"{merged['error_band']}; wider where a preset is changed"
        data = merged
    try:
        return Cluster.model_validate(data)
    except ValidationError as fault:
        raise UsageError(_validation_message(fault), _REMEDY) from None


def _preset_data(name: object) -> dict[str, object]:
    if not isinstance(name, str) or name not in PRESETS:
        known = f"(known: {name_list(PRESETS)}){did_you_mean(name, PRESETS)}"
        raise UsageError(f"no cluster preset `{name}` {known}", _REMEDY)
    return PRESETS[name]


def _merged(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """``base`` overridden by ``changes``, recursively for nested mappings."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = (
            _merged(old, value)
            if isinstance(old, Mapping) and isinstance(value, Mapping)
            else value
        )
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
        else:
            text = str(error["msg"]).removeprefix("Value error, ")
        lines.append(f"{path}: {text}")
    return "\n".join(lines)


def _known_keys(path: tuple[int | str, ...]) -> list[str]:
    """The valid keys of the mapping at this path of a cluster file."""
    parts: dict[str, type[ComputeDevice | IntraNodeLink | NetworkCards | Network]] = {
        "device": ComputeDevice,
        "intra": IntraNodeLink,
        "nics": NetworkCards,
        "network": Network,
    }
    model = parts.get(str(path[0]), Cluster) if path else Cluster
    return [info.alias or name for name, info in model.model_fields.items()] + ["preset"] * (
        not path
    )
