"""What the keys of a scenario file mean, each in a sentence, with an example: descriptions of the
Pydantic fields (`distsim.common.field_parsing.describe_fields`).

A key is ``Model.key``. Schema, docs/format.md, hover texts and `distsim explain` read them from the
models.
"""

from __future__ import annotations

from distsim.common.field_parsing import FieldHelp

FIELD_HELP: dict[str, FieldHelp] = {
    # --- the file ---
    "ScenarioFileFields.name": FieldHelp(
        "What the scenario is called; left out, the file's name.", "ring"
    ),
    "ScenarioFileFields.about": FieldHelp(
        "What it shows, in a sentence or two.", "Four ranks pass a token round."
    ),
    "ScenarioFileFields.world": FieldHelp(
        "Who is there: so many ranks on one machine, or `{nodes, ranks_per_node}`.", 4
    ),
    "ScenarioFileFields.backend": FieldHelp(
        "Whose rules hold: what blocks, what is refused, what buffers.", "nccl"
    ),
    "ScenarioFileFields.cluster": FieldHelp(
        "What it costs: a preset (`distsim clusters`), a cluster file, or a mapping: `preset` "
        "and what differs, or all of it.",
        "dgx-a100",
    ),
    "ScenarioFileFields.mesh": FieldHelp(
        "Ranks as a grid, axes from the outermost in, as init_device_mesh; each axis is a group "
        "and a word of expressions.",
        {"replica": 2, "stage": 2},
    ),
    "ScenarioFileFields.vars": FieldHelp(
        "Named numbers, conditions and quantities, by expression; each may use those before it.",
        {"next": "(rank + 1) % world_size", "step": "3 ms"},
    ),
    "ScenarioFileFields.groups": FieldHelp(
        "Groups beside the axes of the mesh, by name; a list of ranks is short for `{ranks: […]}`.",
        {"pair": [0, 1]},
    ),
    "ScenarioFileFields.tensors": FieldHelp(
        "What is sent and computed, by name.", {"grad": {"shape": [1024], "dtype": "bfloat16"}}
    ),
    "ScenarioFileFields.memory": FieldHelp(
        "What ranks hold at their peak, by name; compared with what the device has.",
        {"all": {"parameters": "4 GiB"}},
    ),
    "ScenarioFileFields.program": FieldHelp(
        "What the ranks do: a list of entries. A rank runs, in this order, those that select it.",
        ["barrier"],
    ),
    "ScenarioFileFields.iterations": FieldHelp(
        "How often the program runs, as training steps; `iteration` counts them from 0.", 3
    ),
    "ScenarioFileFields.options": FieldHelp(
        "Settings of torch.distributed and of back ends.", {"timeout": "30 s"}
    ),
    "ScenarioFileFields.launch": FieldHelp(
        "How the ranks are started, for the launch plan and real runs.", {"master_port": 29500}
    ),
    "ScenarioFileFields.faults": FieldHelp(
        "What goes wrong: ranks that die, are slow or late, slow links.",
        [{"rank": 1, "kind": "kill", "at": "3 ms"}],
    ),
    "ScenarioFileFields.seed": FieldHelp(
        "Where chance starts from: the same seed, the same run.", 7
    ),
    "ScenarioFileFields.jitter": FieldHelp(
        "How much longer computes take by chance, each by its own draw: 0.1 is up to ten per cent.",
        0.1,
    ),
    "ScenarioFileFields.sweep": FieldHelp(
        "What `distsim sweep` runs: every point of a grid.", {"grid": {"mesh.dp": [1, 2, 4]}}
    ),
    "ScenarioFileFields.expect": FieldHelp(
        "What must come out; `distsim test` compares.", {"verdict": "ok"}
    ),
    # --- who is there ---
    "World.nodes": FieldHelp("Machines.", 2),
    "World.ranks_per_node": FieldHelp("Ranks on each machine; `local_rank` counts them.", 8),
    "GroupDecl.ranks": FieldHelp("The members, by their global numbers.", [0, 2]),
    "GroupDecl.axes": FieldHelp(
        "Axes of the mesh: a group for each line or plane along them.", ["dp", "cp"]
    ),
    "GroupDecl.by": FieldHelp(
        "A group for each value of an expression: ranks with the same value are together.",
        "rank % 2",
    ),
    "GroupDecl.backend": FieldHelp("The group's back end; left out, the scenario's.", "gloo"),
    "GroupDecl.timeout": FieldHelp(
        "How long its calls may wait; a group does not inherit the world's.", "10 min"
    ),
    # --- tensors ---
    "TensorDecl.shape": FieldHelp(
        "Its sizes, by expression, by rank where they differ; `auto`: that of what first writes "
        "it.",
        [8, 1024],
    ),
    "TensorDecl.dtype": FieldHelp(
        "What its elements are; `torch.float32` is taken too.", "bfloat16"
    ),
    "TensorDecl.value": FieldHelp(
        "Its numbers at the start: one that fills it, a (nested) list, or an expression over "
        "rank, `index` (of the element) and `copy`; "
        "left out, unknown.",
        "rank + 1",
    ),
    "TensorDecl.copies": FieldHelp(
        "How many there are, for micro-batches and the like; `x@2` is one of them.", "micro_batches"
    ),
    "TensorDecl.like": FieldHelp("Another tensor, which gives what is left out here.", "grad"),
    # --- memory ---
    "MemoryDecl.ranks": FieldHelp("Who holds it; left out: everybody.", "stage == 0"),
    "MemoryDecl.parameters": FieldHelp("The model's parameters.", "4 GiB"),
    "MemoryDecl.gradients": FieldHelp("Their gradients.", "4 GiB"),
    "MemoryDecl.optimizer": FieldHelp("The optimizer's states.", "8 GiB"),
    "MemoryDecl.activations": FieldHelp(
        "What the forward pass keeps for the backward pass.", "10 GiB"
    ),
    "MemoryDecl.gathered": FieldHelp(
        "Full parameters of layers that are sharded at rest.", "1 GiB"
    ),
    "MemoryDecl.allocated": FieldHelp(
        "The most that tensors hold at a time, where it is less than all parts together.", "20 GiB"
    ),
    # --- options ---
    "ProcessGroupOptions.init": FieldHelp(
        "nccl: communicators are made at their first use (lazy), or all at once (eager: "
        "device_id is given).",
        "eager",
    ),
    "ProcessGroupOptions.blocking_wait": FieldHelp(
        "TORCH_NCCL_BLOCKING_WAIT: wait() blocks the host until the work is done.", True
    ),
    "ProcessGroupOptions.launch_order_implicit": FieldHelp(
        "NCCL_LAUNCH_ORDER_IMPLICIT: communicators launch in the order of the host's calls.", True
    ),
    "ProcessGroupOptions.timeout": FieldHelp(
        "init_process_group's timeout; left out, 30 min, with nccl 10 min.", "30 s"
    ),
    "ProcessGroupOptions.init_method": FieldHelp(
        "init_process_group's init_method; left out, `env://`.", "env://"
    ),
    "ProcessGroupOptions.buffsize": FieldHelp(
        "How far an nccl send may run ahead of its receive: NCCL_BUFFSIZE on each of a pair's "
        "two channels.",
        "8 MiB",
    ),
    "ProcessGroupOptions.eager_limit": FieldHelp(
        "The size up to which an MPI send is buffered.", "4 KiB"
    ),
    # --- launch ---
    "LaunchOptions.master_addr": FieldHelp("MASTER_ADDR: where rank 0's store listens.", "node0"),
    "LaunchOptions.master_port": FieldHelp("MASTER_PORT.", 29500),
    "LaunchOptions.visible_devices": FieldHelp(
        "CUDA_VISIBLE_DEVICES of each machine.", [0, 1, 2, 3]
    ),
    "LaunchOptions.omp_threads": FieldHelp("OMP_NUM_THREADS of each rank.", 4),
    "LaunchOptions.start": FieldHelp("multiprocessing's start method.", "spawn"),
    "LaunchOptions.by": FieldHelp(
        "What starts the ranks: it decides which variables they find, and whether its agent or "
        "rank 0 serves the store.",
        "mp.spawn",
    ),
    "LaunchOptions.env": FieldHelp(
        "Variables that ranks find in place of the launcher's, by rank where they differ; "
        "`null`: not set.",
        {"MASTER_ADDR": "node0", "RANK": "rank"},
    ),
    "LaunchOptions.hosts": FieldHelp(
        "Names or addresses of the machines, in order; no other name resolves.", ["node0", "node1"]
    ),
    "LaunchOptions.ports_taken": FieldHelp("Ports that something else listens on.", [29500]),
    "LaunchOptions.files_left": FieldHelp(
        "Rendezvous files that an earlier run has left.", ["/shared/meet"]
    ),
    # --- faults ---
    "FaultDecl.kind": FieldHelp(
        "What happens: killed, an exception, an exit, slow, late at the start, or never there.",
        "kill",
    ),
    "FaultDecl.rank": FieldHelp("The rank that is hit.", 3),
    "FaultDecl.ranks": FieldHelp("The ranks that are hit.", "node == 1"),
    "FaultDecl.link": FieldHelp(
        "The kind of link that is slow: `nic`, `network`, or inside a machine `intra` (nvlink, "
        "pcie, shm).",
        "nic",
    ),
    "FaultDecl.nodes": FieldHelp("The machines whose link is slow; left out: all.", [1]),
    "FaultDecl.iteration": FieldHelp("In which iteration, from 0.", 3),
    "FaultDecl.before_call": FieldHelp("Before which of the rank's calls, from 0.", 2),
    "FaultDecl.at": FieldHelp("When, after the start.", "3 ms"),
    "FaultDecl.factor": FieldHelp("How many times as long it takes: what is slow.", 1.3),
    "FaultDecl.code": FieldHelp("The exit status of the kind `exit`.", 1),
    "FaultDecl.delay": FieldHelp(
        "How much later than the others a rank of the kind `late` starts.", "50 ms"
    ),
    # --- sweeps ---
    "SweepDecl.grid": FieldHelp(
        "Keys of the file (or vars), each with the values that it takes; every combination is a "
        "point.",
        {"mesh.dp": [1, 2, 4]},
    ),
    "SweepDecl.cluster": FieldHelp(
        "Clusters, each of which every point is priced on.", ["dgx-a100", "dgx-h100"]
    ),
    "SweepDecl.budget": FieldHelp(
        "Points that a guided search tries, where the grid is too large; left out: all.", 100
    ),
    # --- expectations ---
    "DurationBounds.at_least": FieldHelp("It must take at least this.", "10 ms"),
    "DurationBounds.at_most": FieldHelp("It must take at most this.", "20 ms"),
    "Expectations.verdict": FieldHelp(
        "What may become of the program, over all orders of events.", "ok"
    ),
    "Expectations.depends_on": FieldHelp(
        "What the verdict hinges on; `null`: on nothing.", "buffering"
    ),
    "Expectations.outcome": FieldHelp(
        "What this run does; `{gloo: …, nccl: …}` for several back ends.", "completes"
    ),
    "Expectations.ranks": FieldHelp("The ranks that the verdict names.", [0, 1]),
    "Expectations.core": FieldHelp("The ranks of the circle, or those that caused it.", [0, 1]),
    "Expectations.findings": FieldHelp("Codes of the findings, all of them.", ["DS301"]),
    "Expectations.values": FieldHelp(
        "Numbers of tensors at the end, by rank; `?` is an unknown one.",
        {"grad": {0: 6, "else": 6}},
    ),
    "Expectations.makespan": FieldHelp(
        "Bounds of the time from the start to the last end.", {"at_most": "20 ms"}
    ),
    "Expectations.iteration": FieldHelp(
        "Bounds of the time of one iteration.", {"at_most": "20 ms"}
    ),
    # --- entries ---
    "RepeatFields.times": FieldHelp("How often, by rank where it differs.", "micro_batches"),
    "RepeatFields.index": FieldHelp("What counts the rounds inside, from 0.", "m"),
    "RepeatFields.steps": FieldHelp("What is repeated.", ["barrier"]),
    "BlockFields.ranks": FieldHelp(
        "Who makes these steps: a rank, a list of ranks, or a condition; left out, everybody. A "
        "step may have it too.",
        "stage == 0",
    ),
    "BlockFields.steps": FieldHelp("Their steps, in order.", ["barrier"]),
    # --- clusters ---
    "Cluster.preset": FieldHelp(
        "The cluster that this one is like, but for what else stands here.", "dgx-h100"
    ),
    "Cluster.name": FieldHelp("What reports call it.", "our-pod"),
    "Cluster.source": FieldHelp("Where the numbers are from.", "nccl-tests, 2026-03"),
    "Cluster.error_band": FieldHelp("How sure the times are; the report ends with it.", "+-20 %"),
    "Cluster.device": FieldHelp("What one rank computes on.", {"memory_size": "80 GiB"}),
    "Cluster.intra": FieldHelp(
        "The way between two ranks of a machine, per rank and direction.", {"bandwidth": "300 GB/s"}
    ),
    "Cluster.nics": FieldHelp("The network cards of a machine.", {"count": 8}),
    "Cluster.network": FieldHelp("What lies between the cards.", {"oversubscription": 2}),
    "Cluster.call_overhead": FieldHelp(
        "What a communication call costs before its first byte moves.", "8 us"
    ),
    "Cluster.collectives": FieldHelp(
        "By NCCL's algorithms and protocols (nccl), over every card (rails), or as Gloo does "
        "(flat).",
        "rails",
    ),
    "Cluster.algorithms": FieldHelp(
        "The algorithm that is priced, by what the operation brings about, or `cheapest`.",
        {"all_reduce": "ring"},
    ),
    "Cluster.shared_links": FieldHelp(
        "Transfers that cross a card, or a rank's link, at the same time share it.", True
    ),
    "Cluster.crossing": FieldHelp(
        "On flat clusters: how much of a transfer's moving time a process's thread is taken up "
        "by it, 0 to 4.",
        1.0,
    ),
    "Cluster.reduce_bandwidth": FieldHelp(
        "At which a rank combines what came with what it has, on a CPU.", "5 GB/s"
    ),
    "Cluster.measured": FieldHelp(
        "Times that were measured, by operation and size; `distsim calibrate` writes them.", []
    ),
    "Cluster.gpus_per_process": FieldHelp(
        "How many GPUs one process drives; torch.distributed drives one (nccl-tests' `-g`).", 1
    ),
    "Cluster.host": FieldHelp("The CPU's maker, by which NCCL chooses between nodes.", "intel"),
    "Device.architecture": FieldHelp(
        "The GPU's generation, by which NCCL's forms are chosen.", "hopper"
    ),
    "Link.switch": FieldHelp(
        "Links meet in a switch (which can reduce, from H100 on); else they go from GPU to GPU.",
        True,
    ),
    "Link.peer_access": FieldHelp(
        "GPUs reach each other over PCIe; else they stage through the host's memory.", True
    ),
    "Link.domain": FieldHelp("Ranks that these links join across machines (NVL72: 72).", 72),
    "Link.mesh": FieldHelp(
        "Ranks whose links go from each to each alike, or cube: DGX-1's. A part of them has a "
        "part of its links.",
        8,
    ),
    "Link.per_switch": FieldHelp(
        "Ranks behind one PCIe switch: they share its way up. Left out: each slot has its own.", 4
    ),
    "Network.leaf": FieldHelp(
        "Machines on one leaf switch, whose way up `oversubscription` then narrows for all that "
        "leaves it.",
        16,
    ),
    "Network.transport": FieldHelp("What the cards speak.", "ib"),
    "Network.reduces": FieldHelp("Its switches can reduce.", True),
    "Device.name": FieldHelp("What the device is called.", "A100-80G"),
    "Device.peak": FieldHelp(
        "Its rate by dtype; one that is left out runs at float32's.", {"bfloat16": "312 TFLOP/s"}
    ),
    "Device.memory_bandwidth": FieldHelp("Of its memory.", "2 TB/s"),
    "Device.memory_size": FieldHelp("Of its memory.", "80 GiB"),
    "Device.launch": FieldHelp("What launching one kernel takes.", "5 us"),
    "Device.compute_efficiency": FieldHelp(
        "Share of the peak that a large matrix product reaches.", 0.7
    ),
    "Device.memory_efficiency": FieldHelp("Share of the memory's bandwidth that is reached.", 0.8),
    "Device.overlap_compute": FieldHelp(
        "By what a kernel takes longer while its rank communicates.", 1.19
    ),
    "Device.overlap_transfers": FieldHelp(
        "By what a transfer takes longer while a rank of its computes.", 1.1
    ),
    "Device.source": FieldHelp("Where the numbers are from.", "data sheet"),
    "Link.kind": FieldHelp("What it is.", "nvlink"),
    "Link.latency": FieldHelp("One hop of one message.", "3 us"),
    "Link.bandwidth": FieldHelp("Per rank and direction.", "300 GB/s"),
    "Link.efficiency": FieldHelp("Share of the bandwidth that a ring reaches.", 0.8),
    "Link.source": FieldHelp("Where the numbers are from.", "data sheet"),
    "Nics.count": FieldHelp("Cards of a machine.", 8),
    "Nics.latency": FieldHelp("One hop of one message through a card.", "2 us"),
    "Nics.bandwidth": FieldHelp("Of one card, per direction.", "25 GB/s"),
    "Nics.efficiency": FieldHelp("Share of the bandwidth that is reached.", 0.9),
    "Nics.source": FieldHelp("Where the numbers are from.", "data sheet"),
    "Network.latency": FieldHelp("One hop between two cards.", "1 us"),
    "Network.oversubscription": FieldHelp(
        "2: half of a machine's card bandwidth gets through.", 1.0
    ),
    "Network.source": FieldHelp("Where the numbers are from.", "data sheet"),
    "Curve.op": FieldHelp("The operation; `send` stands for every message.", "all_reduce"),
    "Curve.group": FieldHelp("Ranks in each group.", 8),
    "Curve.ranks": FieldHelp("Ranks on each machine, all busy at once.", 8),
    "Curve.nodes": FieldHelp("Machines that a group spans.", 1),
    "Curve.times": FieldHelp(
        "How long it took, by bytes as nccl-tests counts them.", {"4 MiB": "100 us"}
    ),
}

__all__ = ["FIELD_HELP"]
