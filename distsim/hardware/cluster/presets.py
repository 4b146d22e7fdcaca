"""Built-in clusters as plain data; each number has its source.

Data-sheet figures are the vendors'. On GPUs, ``efficiency`` is the share of the data sheet's
bandwidth that NCCL assumes when it chooses an algorithm (src/graph/topo.h). NVLink 2 and 3: 20 of
25 GB/s per link. NVLink 4: 20.6. NVLink 5: 40.1 of 50. PCIe 3: 12 of 16 GB/s, doubled with each
generation. A 100 Gbit/s card: 12 of 12.5 GB/s. `distsim.hardware.cost.nccl_constants` has
the share of that bandwidth which real transfers reach. None of these numbers was measured on your
machines; `distsim.hardware.cost.prediction_range` states how far off they may be.
"""

from __future__ import annotations

from typing import Final

from distsim.hardware.cluster import devices
from distsim.hardware.cluster.devices import CPU, LOOPBACK, PresetData

_CPU_RANGE = (
    "measured times may differ from the predicted time by 40 % (an estimate: hosts and "
    "TCP stacks vary widely)"
)
_ONE_CARD = "a guess: one 100 Gbit/s card"
_NCCL_SOURCE = "NCCL topo.h and tuning.cc"
#: Covers 90 % of the measured times of held-out systems, which the fit did not use
#: (`distsim.hardware.cost.prediction_range`).
_FITTED_RANGE = (
    "in published measurements, 90 % of communication times are 0.65-1.4x the prediction on one "
    "node and 0.7-2.1x across nodes"
)
_UNFITTED_RANGE = (
    "few or no published measurements: expect 90 % of communication times to be 0.4-2x the "
    "prediction on one node and 0.5-4x across nodes"
)
_FITTED_ARCHITECTURES = ("volta", "ampere", "hopper")


def _nvlink(generation: int, **more: object) -> PresetData:
    """All NVLink links of a GPU together, per direction (NVIDIA's data sheets)."""
    sheet_bandwidth, efficiency = {
        2: ("150 GB/s", 0.8),
        3: ("300 GB/s", 0.8),
        4: ("450 GB/s", 0.824),
        5: ("900 GB/s", 0.802),
    }[generation]
    return {
        "kind": "nvlink",
        "latency": "0.6 us",
        "bandwidth": sheet_bandwidth,
        "efficiency": efficiency,
        "source": f"NVLink {generation}; {_NCCL_SOURCE}",
        **more,
    }


def _pcie(generation: int, **more: object) -> PresetData:
    """A PCIe connection with 16 lanes, per direction."""
    sheet_bandwidth = {3: "16 GB/s", 4: "32 GB/s", 5: "64 GB/s"}[generation]
    return {
        "kind": "pcie",
        "latency": "1 us",
        "bandwidth": sheet_bandwidth,
        "efficiency": 0.75,
        "switch": False,
        "source": f"PCIe {generation}.0 x16; {_NCCL_SOURCE}",
        **more,
    }


def _nics(count: int, gbits: int, source: str) -> PresetData:
    return {
        "count": count,
        "latency": "1 us",
        "bandwidth": f"{gbits} Gbit/s",
        "efficiency": 0.96,
        "source": source,
    }


def _cluster(
    name: str,
    device: PresetData,
    intra: PresetData,
    nics: PresetData,
    transport: str,
    source: str,
    **more: object,
) -> PresetData:
    """A GPU cluster.

    A hop through the network takes 4 us (NCCL tuning.cc: ring, LL128). Launching a call takes 3.1
    us (`distsim.hardware.cost.nccl_constants`).
    """
    # The prediction range was fitted to NVLink machines on InfiniBand of these generations only.
    on_fitted_network = transport == "ib" and intra["kind"] == "nvlink"
    is_fitted = on_fitted_network and device["architecture"] in _FITTED_ARCHITECTURES
    band = _FITTED_RANGE if is_fitted else _UNFITTED_RANGE
    return {
        "name": name,
        "source": source,
        "error_band": band,
        "device": device,
        "intra": intra,
        "nics": nics,
        "network": {
            "latency": "4 us",
            "transport": transport,
            "source": "NCCL tuning.cc, ring, network, LL128",
        },
        "call_overhead": "3.1 us",
        "collectives": "nccl",
        **more,
    }


_GPU_CLUSTERS: Final = (
    _cluster(
        "dgx1-v100",
        devices.V100,
        _nvlink(2, switch=False, mesh="cube"),
        _nics(4, 100, "DGX-1 data sheet: 4 x EDR"),
        "ib",
        "NVIDIA DGX-1 data sheet: 8 GPUs in a cube mesh, 6 links each",
    ),
    _cluster(
        "dgx2-v100",
        devices.V100,
        _nvlink(2),
        _nics(8, 100, "DGX-2 data sheet: 8 x EDR"),
        "ib",
        "DGX-2 data sheet: 16 GPUs",
    ),
    _cluster(
        "dgx-a100",
        devices.A100,
        _nvlink(3),
        _nics(8, 200, "DGX A100 data sheet: 8 x HDR"),
        "ib",
        "NVIDIA DGX A100 data sheet",
        host="amd",
    ),
    _cluster(
        "dgx-h100",
        devices.H100,
        _nvlink(4),
        _nics(8, 400, "DGX H100 data sheet: 8 x NDR"),
        "ib",
        "DGX H100 data sheet",
    ),
    _cluster(
        "dgx-h800",
        devices.H800,
        _nvlink(
            4,
            bandwidth="200 GB/s",
            source=f"arXiv:2505.09343: 400 GB/s both ways; {_NCCL_SOURCE}",
        ),
        _nics(8, 400, "arXiv:2505.09343: 8 x ConnectX-7"),
        "ib",
        "DeepSeek-AI, Insights into DeepSeek-V3, arXiv:2505.09343, section 2.1",
    ),
    _cluster(
        "dgx-h200",
        devices.H200,
        _nvlink(4),
        _nics(8, 400, "DGX H200 data sheet: 8 x NDR"),
        "ib",
        "DGX H200 data sheet",
    ),
    _cluster(
        "dgx-b200",
        devices.B200,
        _nvlink(5),
        _nics(8, 400, "DGX B200 data sheet: 8 x NDR"),
        "ib",
        "DGX B200 data sheet",
    ),
    _cluster(
        "gb200-nvl72",
        devices.GB200,
        _nvlink(5, domain=72),
        _nics(4, 400, "GB200 NVL72 data sheet: 4 x 400 Gbit/s a tray"),
        "ib",
        "NVIDIA GB200 NVL72 data sheet: 18 trays of 4 GPUs, one NVLink domain",
        host="arm",
    ),
    _cluster(
        "gh200",
        devices.GH200,
        _nvlink(4),
        _nics(1, 400, "TACC Vista: NDR, one GH200 per node"),
        "ib",
        "NVIDIA GH200 data sheet; TACC Vista's user guide",
        host="arm",
    ),
    _cluster(
        "mi300x",
        devices.MI300X,
        {
            "kind": "xgmi",
            "latency": "0.6 us",
            "bandwidth": "448 GB/s",
            "efficiency": 0.75,
            "switch": False,
            "mesh": 8,
            "source": "7 links of 64 GB/s, of which about 48 are usable "
            "(AMD: rocm.blogs.amd.com, RCCL bandwidth on MI300X)",
        },
        _nics(8, 400, "usual for 8 x MI300X: 8 x 400 Gbit/s RoCE"),
        "roce",
        "AMD MI300X platform data sheet",
        host="amd",
    ),
    _cluster(
        "a100-pcie",
        devices.A100_PCIE,
        _pcie(4),
        _nics(1, 100, _ONE_CARD),
        "roce",
        "NVIDIA A100 PCIe data sheet",
    ),
    _cluster(
        "l40s-pcie",
        devices.L40S,
        _pcie(4),
        _nics(1, 100, _ONE_CARD),
        "roce",
        "NVIDIA L40S data sheet",
    ),
    _cluster(
        "l4-pcie", devices.L4, _pcie(4), _nics(1, 100, _ONE_CARD), "tcp", "NVIDIA L4 data sheet"
    ),
    _cluster(
        "aws-p4d",
        devices.A100_40,
        _nvlink(3),
        _nics(4, 100, "AWS: 4 x 100 Gbit/s EFA"),
        "efa",
        "AWS EC2 P4d page",
    ),
    _cluster(
        "aws-p5",
        devices.H100,
        _nvlink(4),
        _nics(8, 400, "AWS: 3200 Gbit/s EFA, 4 x 100 per GPU, modelled as one card"),
        "efa",
        "AWS EC2 P5 page",
        host="amd",
    ),
    _cluster(
        "gcp-a3-high",
        devices.H100,
        _nvlink(4),
        _nics(4, 200, "Google Cloud: 4 x 200 Gbit/s for GPUs"),
        "tcpx",
        "Google Cloud, A3 High machine types (GPUDirect-TCPX)",
    ),
    _cluster(
        "gcp-a3-mega",
        devices.H100,
        _nvlink(4),
        _nics(8, 200, "Google Cloud: 8 x 200 Gbit/s for GPUs"),
        "tcpxo",
        "Google Cloud, A3 Mega machine types (GPUDirect-TCPXO)",
    ),
    _cluster(
        "azure-nd-h100-v5",
        devices.H100,
        _nvlink(4),
        _nics(8, 400, "Azure: 8 x 400 Gbit/s NDR"),
        "ib",
        "Microsoft Azure, ND H100 v5 series",
    ),
)

_CPU_CLUSTERS: Final[dict[str, PresetData]] = {
    "cpu-10gbe": {
        "name": "cpu-10gbe",
        "source": "10 Gbit Ethernet, TCP, published Gloo sweeps",
        "error_band": _CPU_RANGE,
        "device": CPU,
        "intra": LOOPBACK,
        "nics": {
            "count": 1,
            "bandwidth": "10 Gbit/s",  # IEEE 802.3ae
            "efficiency": 0.94,  # TCP payload at an MTU of 1500: 1448 of 1538 bytes on the wire
            "source": "IEEE 802.3ae; TCP framing",
        },
        "network": {
            "latency": "30 us",
            "transport": "tcp",
            "source": "published Gloo sweeps: 15 to 60 us per step over 10 to 40 GbE",
        },
        "call_overhead": "20 us",  # a Gloo call's hand-over to a worker thread and back
        "collectives": "flat",
    },
    "cpu-25gbe": {
        "name": "cpu-25gbe",
        "source": "25 Gbit Ethernet, TCP, published Gloo sweeps",
        "error_band": _CPU_RANGE,
        "device": CPU,
        "intra": LOOPBACK,
        "nics": {
            "count": 1,
            "bandwidth": "25 Gbit/s",  # IEEE 802.3by
            "efficiency": 0.57,  # 2.8 of 5 GB/s on 40 GbE with Gloo: the loop thread, not the wire
            "source": "IEEE 802.3by; efficiency from the Gloo project's 4 x 40 GbE sweep",
        },
        "network": {
            "latency": "25 us",
            "transport": "tcp",
            "source": "published Gloo sweeps: 15 to 60 us per step over 10 to 40 GbE",
        },
        "call_overhead": "20 us",  # as cpu-10gbe
        "collectives": "flat",
    },
}

#: Ends the name of a preset with changed values.
CHANGED_SUFFIX: Final = ", changed"
#: GPUs per machine for clusters that do not have 8; sources as above.
GPUS_PER_MACHINE: Final = {"dgx2-v100": 16, "gb200-nvl72": 4, "gh200": 1}
PRESETS: Final[dict[str, PresetData]] = {
    str(cluster["name"]): cluster for cluster in _GPU_CLUSTERS
} | _CPU_CLUSTERS


def is_preset(cluster: str) -> bool:
    """Whether a cluster with this name is a preset, or a preset with changed values."""
    return cluster.removesuffix(CHANGED_SUFFIX) in PRESETS


def gpus_per_machine(cluster: str) -> int:
    """GPUs per machine of the cluster with this name; a changed preset has those of the preset."""
    return GPUS_PER_MACHINE.get(cluster.removesuffix(CHANGED_SUFFIX), 8)
