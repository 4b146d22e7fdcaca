"""What cannot be recorded itself on CPU, as plain programs that make the calls which the sources
say, in the sources' order.

vLLM runs its parallel layers and its messages between prefill and decode on CUDA groups of its own
(parallel_state.py, p2p_nccl_engine.py); DeepEP's kernels are no calls of torch.distributed;
torchft's groups are its own classes, with a server that tells quorums. So these rows hold the
expansion to torch's calls, groups, peers and sizes, and to our reading of the sources, not to the
frameworks' own runs.
"""

from __future__ import annotations

from typing import Any

from tests.support.wrapped import Case

HIDDEN, VOCABULARY, LAYERS = 16, 32, 4
Log = list[dict[str, Any]]


# --- vLLM: tensor, pipeline, data and expert parallel steps ---
class Engine:
    """One rank of an inference mesh; axes of one rank make no calls."""

    def __init__(self, mesh: dict[str, int]) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.torch, self.dist = torch, dist
        made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        self.groups = {axis: made.get_group(axis) for axis, size in mesh.items() if size > 1}
        self.at = {axis: made.get_local_rank(axis) for axis in mesh}
        self.sizes = mesh

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def summed(self, x: Any, axis: str = "tp", op: str = "SUM") -> None:
        if axis in self.groups:
            self.dist.all_reduce(x, getattr(self.dist.ReduceOp, op), group=self.groups[axis])

    def peer(self, by: int) -> int:
        return self.dist.get_global_rank(self.groups["pp"], self.at["pp"] + by)

    def mixed(self, x: Any) -> None:
        """Tokens of all data ranks to the experts, and results back."""
        every = self.torch.zeros(self.size("dp") * x.shape[0], HIDDEN)
        self.dist.all_gather_into_tensor(every, x, group=self.groups["dp"])
        self.dist.reduce_scatter_tensor(x, every, group=self.groups["dp"])

    def layers(self, x: Any, experts: bool) -> None:
        for _ in range(LAYERS // self.size("pp")):
            self.summed(x)
            if experts:
                self.mixed(x)
            self.summed(x)

    def step(self, tokens: int, batch: int, experts: bool = False) -> None:
        torch, dist = self.torch, self.dist
        first, last = self.at.get("pp", 0) == 0, self.at.get("pp", 0) == self.size("pp") - 1
        if "dp" in self.groups:
            self.summed(torch.zeros(4, self.size("dp"), dtype=torch.int32), "dp")
        x, residual = torch.zeros(tokens, HIDDEN), torch.zeros(tokens, HIDDEN)
        if first:
            self.summed(x)
        else:
            for one in (x, residual):
                dist.recv(one, self.peer(-1), group=self.groups["pp"])
        self.layers(x, experts)
        if not last:
            for one in (x, residual):
                dist.send(one, self.peer(1), group=self.groups["pp"])
        elif "tp" in self.groups:
            part = torch.zeros(batch, VOCABULARY // self.size("tp"))
            parts = (
                [torch.zeros_like(part) for _ in range(self.size("tp"))]
                if self.at["tp"] == 0
                else None
            )
            dist.gather(part, parts, group=self.groups["tp"], group_dst=0)
        if "pp" in self.groups:
            dist.broadcast(
                torch.zeros(batch, dtype=torch.int64),
                group=self.groups["pp"],
                group_src=self.size("pp") - 1,
            )


def served(
    mesh: dict[str, int],
    prompt: int = 0,
    steps: int = 2,
    batch: int = 3,
    experts: bool = False,
    every: int = 0,
) -> Any:
    def body(rank: int, size: int, log: Log) -> None:
        engine = Engine(mesh)
        log.clear()
        if prompt:
            engine.step(prompt, batch, experts)
        for k in range(steps):
            engine.step(batch, batch, experts)
            if every and (k + 1) % every == 0:
                engine.summed(engine.torch.zeros(1, dtype=engine.torch.int32), "dp", "MAX")

    return body


def serving(
    about: str,
    mesh: dict[str, int],
    prompt: int = 0,
    steps: Any = 2,
    experts: bool = False,
    every: int = 0,
) -> Case:
    axes = {
        word: axis
        for word, axis in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"))
        if axis in mesh
    }
    most = max(steps.values()) if isinstance(steps, dict) else steps
    fields = {
        **axes,
        "layers": LAYERS,
        "hidden": HIDDEN,
        "vocabulary": VOCABULARY,
        "dtype": "float32",
        "prompt": prompt,
        "batch": 3,
        "steps": steps,
        "experts": experts,
        "sync_every": every,
        "decode": "1 ms",
    }
    ranks = 1
    for size in mesh.values():
        ranks *= size
    body = served(mesh, prompt, most, experts=experts, every=every)
    return Case(f"vLLM: {about}", ranks, body, {"mesh": mesh, "program": [{"inference": fields}]})


# --- keys and values from prefill to decode ---
def handed(
    prefill: list[int],
    decode: list[int],
    layers: int,
    shape: list[int],
    at_once: bool,
    requests: int,
) -> Any:
    def body(rank: int, size: int, log: Log) -> None:
        import torch
        import torch.distributed as dist

        wide = max(len(prefill), len(decode))
        pairs = [
            (prefill[k * len(prefill) // wide], decode[k * len(decode) // wide])
            for k in range(wide)
        ]
        rounds = 1 if at_once else layers
        whole = [layers, *shape] if at_once else shape
        log.clear()
        for _ in range(requests):
            if rank in prefill:
                mine = [to for giver, to in pairs if giver == rank]
                works = [dist.isend(torch.zeros(whole), to) for _ in range(rounds) for to in mine]
            else:
                mine = [giver for giver, to in pairs if to == rank]
                works = [
                    dist.irecv(torch.zeros(whole), giver) for _ in range(rounds) for giver in mine
                ]
            for work in works:
                work.wait()

    return body


def transfer(
    about: str, prefill: list[int], decode: list[int], at_once: bool = False, requests: int = 1
) -> Case:
    heads = 4 if len(prefill) >= len(decode) else 4 * len(prefill) // len(decode)
    fields = {
        "prefill": prefill,
        "decode": decode,
        "layers": 3,
        "tokens": 8,
        "kv_heads": 4,
        "head_dim": 2,
        "dtype": "float32",
        "at_once": at_once,
        "requests": requests,
        "forward": "1 ms",
    }
    body = handed(prefill, decode, 3, [2, 8, heads, 2], at_once, requests)
    return Case(
        f"KV transfer: {about}",
        len(prefill) + len(decode),
        body,
        {"program": [{"kv_transfer": fields}]},
    )


# --- torchft: a group for each quorum ---
SIZES = ((4, 3), (5, 4))


def quorums(members: dict[int, list[int]], iterations: int) -> Any:
    def body(rank: int, size: int, log: Log) -> None:
        import torch
        import torch.distributed as dist

        log.clear()
        before: list[int] = []
        group: Any = None
        for iteration in range(iterations):
            new = members.get(iteration)
            if new is not None:
                made = dist.new_group(
                    new
                )  # by all: torchft's own stores are not torch.distributed's
                group = made if rank in new else group
                joined = [r for r in new if before and r not in before]
                givers = [r for r in new if r in before]
                for k, late in enumerate(joined):
                    for out, in_ in SIZES:
                        for numel in (out * in_, out):
                            if rank == givers[k % len(givers)]:
                                dist.send(torch.zeros(numel), late, group=group)
                            elif rank == late:
                                dist.recv(torch.zeros(numel), givers[k % len(givers)], group=group)
                before = new
            if rank in before:
                works = [
                    dist.all_reduce(torch.zeros(out * in_ + out), group=group, async_op=True)
                    for out, in_ in SIZES[::-1]
                ]
                for work in works:
                    work.wait()

    return body


def tolerant(
    about: str, ranks: int, members: dict[int, list[int]], iterations: int, **fields: Any
) -> Case:
    layers = [
        {"params": [[out, in_], [out]], "forward": "1 ms", "backward": "2 ms"} for out, in_ in SIZES
    ]
    program = [{"fault_tolerant": {"layers": layers, "quorums": members, **fields}}]
    return Case(
        f"torchft: {about}",
        ranks,
        quorums(members, iterations),
        {"iterations": iterations, "program": program},
    )


# --- tokens to experts in two stages ---
def dispatched(pieces: int, once: bool, layers: int, backward: bool) -> Any:
    """64 tokens of 256 elements for 2 of 16 experts, on 2 machines of 2 ranks."""

    def body(rank: int, size: int, log: Log) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "ep"))
        groups = [mesh.get_group("machine"), mesh.get_group("ep")]
        rows = (
            [2 * -(-50 // pieces), 2 * 2 * -(-29 // pieces)]
            if once
            else [128 // pieces, 128 // pieces]
        )
        log.clear()

        def stage(kind: int) -> list[Any]:
            both = [
                [torch.zeros(rows[kind], 256, dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(pieces)
            ]
            return [
                lambda x=x: dist.all_to_all_single(*x, group=groups[kind], async_op=True)
                for x in both
            ]

        def moved(way: str) -> None:
            first, second = (0, 1) if way == "out" else (1, 0)
            going, after = [start() for start in stage(first)], []
            for work, start in zip(going, stage(second), strict=True):
                work.wait()
                after.append(start())
            for work in after:
                work.wait()

        for _ in range(layers):
            dist.all_to_all_single(
                torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
            )
            moved("out")
            moved("back")
        for _ in range(layers if backward else 0):
            moved("out")
            moved("back")

    return body


def experts(
    about: str, pieces: int = 1, once: bool = False, layers: int = 1, backward: bool = True
) -> Case:
    fields = {
        "experts": 16,
        "tokens": 64,
        "top_k": 2,
        "hidden": 256,
        "forward": "1 ms",
        "between": "machine",
        "pieces": pieces,
        "once_per_machine": once,
        "layers": layers,
        **({"backward": "2 ms"} if backward else {}),
    }
    body = dispatched(pieces, once, layers, backward)
    return Case(
        f"two stages of experts: {about}",
        4,
        body,
        {"mesh": {"machine": 2, "ep": 2}, "program": [{"expert_parallel": fields}]},
    )


CASES: dict[str, Case] = {
    "tp2": serving("decode over 2 tensor ranks", {"tp": 2}),
    "tp4": serving("prefill and decode over 4 tensor ranks", {"tp": 4}, prompt=8),
    "pp2": serving("two stages", {"pp": 2}, prompt=8),
    "pp4": serving("four stages", {"pp": 4}),
    "pp_tp": serving("two stages of two tensor ranks", {"pp": 2, "tp": 2}, prompt=8),
    "dp": serving("two replicas that agree on their batch", {"dp": 2}, every=2),
    "dp_uneven": serving(
        "a replica that is done steps with dummy batches", {"dp": 2}, steps={0: 4, 1: 1}, every=2
    ),
    "ep": serving("experts over two replicas", {"dp": 2}, prompt=8, experts=True),
    "ep_tp": serving(
        "experts over replicas of two tensor ranks",
        {"dp": 2, "tp": 2},
        prompt=8,
        steps=4,
        experts=True,
        every=2,
    ),
    "kv": transfer("a rank each", [0], [1]),
    "kv_requests": transfer("two requests", [0], [1], requests=2),
    "kv_at_once": transfer("all layers in one message", [0], [1], at_once=True),
    "kv_wide": transfer("a rank of prefill for two of decode", [0], [1, 2]),
    "kv_narrow": transfer("two of prefill for one of decode", [0, 1], [2]),
    "kv_pairs": transfer("two pairs", [0, 1], [2, 3]),
    "ft": tolerant("one quorum", 2, {0: [0, 1]}, 2),
    "ft_shrink": tolerant("a replica leaves", 3, {0: [0, 1, 2], 2: [0, 2]}, 3),
    "ft_grow": tolerant("a replica joins", 3, {0: [0, 1], 1: [0, 1, 2]}, 3),
    "ft_both": tolerant("one leaves, and two come", 4, {0: [0, 1], 1: [0], 2: [0, 2, 3]}, 4),
    "ft_sync": tolerant(
        "quorum before the forward pass", 3, {0: [0, 1], 1: [0, 1, 2]}, 2, async_quorum=False
    ),
    "moe": experts("forward and backward"),
    "moe_forward": experts("forward alone, two layers", layers=2, backward=False),
    "moe_pieces": experts("in two pieces", pieces=2),
    "moe_once": experts("a token to a machine once", once=True),
    "moe_once_pieces": experts("the same in two pieces", pieces=2, once=True),
}
