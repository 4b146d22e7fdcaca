"""Programs that train a small model by the calls of a strategy: pipelines, tensor, expert, context
and data parallelism, products.

The calls are the expansion's, compute steps are replaced by arithmetic by elements. Stages are y =
w * x; a tensor parallel pair is y = sum of b_r * (a_r * x)^2 over its ranks r (a column and a row
matrix of diagonal blocks); an expert has one weight for each place of a token; a ring sums q *
kv_j^2 over its ranks. The loss is the sum of (y - t)^2 / 2 over micro-batches and its mean over
replicas.
"""

from __future__ import annotations

from typing import Any

from distsim.scenario import Scenario
from tests.support.training_arithmetic import Assigns, Trained, assigns

#: A power of two, so that the update rounds once on either side.
RATE = 2.0**-8
STEPS = 3
SIZE = 4
FLOAT = {"shape": [SIZE], "dtype": "float64"}


# --- pipelines: every stage multiplies by its weights ---
def stage_of(schedule: str, ranks: int, chunk: int, rank: str = "pp") -> str:
    """The stage of a rank's chunk; schedules in the shape of a V come back down, dualpipe has a
    copy of each on the rank opposite.
    """
    if schedule == "dualpipe":
        return f"{('min', 'max')[chunk]}({rank}, {ranks - 1} - {rank})"
    turned = schedule in ("zbv", "dualpipe_v") and chunk == 1
    return f"({2 * ranks - 1} - {rank})" if turned else f"({chunk * ranks} + {rank})"


def on_stages(fields: dict[str, Any], batches: int) -> Assigns:
    """Arithmetic of a stage, read off the tensors of the compute step. The last stage's backward
    pass reads its own output.
    """
    name, reads, writes = fields["name"], fields["reads"], fields.get("writes", [])
    weight = f"w_{name.partition('of chunk ')[2] or 0}"
    if name.startswith("forward"):
        return [(writes[0], f"{weight} * {reads[0]}")]
    last = reads[0].startswith("pipeline_output_") and "grad" not in reads[0]
    copy = int(reads[0].rpartition("_")[2])
    gradient = f"({reads[0]} - t_{copy % batches})" if last else reads[0]
    added = [(grad, f"{grad} + {gradient} * {reads[1]}") for grad in fields.get("adds", [])]
    return [*added, *((out, f"{gradient} * {weight}") for out in writes)]


def fill_stages(
    made: Trained, schedule: str, ranks: int, chunks: int, batches: int, replica: str = "0"
) -> None:
    """Weights, data and targets, and arithmetic in place of the compute steps."""
    for chunk in range(chunks):
        stage = stage_of(schedule, ranks, chunk)
        made.tensor(f"w_{chunk}", [SIZE], f"1 + {stage} * 0.0625 - index * 0.125")
    first, last = (
        f"{batches} * min(1, {'pp' if given else f'{ranks - 1} - pp'})"
        if schedule == "dualpipe"
        else "0"
        for given in (1, 0)
    )
    for m in range(batches):
        made.tensors[f"pipeline_input_{m}"] = {
            **FLOAT,
            "value": f"1 + ({m} + {first}) * 0.375 - index * 0.125 + {replica} * 0.5",
        }
        made.tensor(f"t_{m}", [SIZE], f"index * 0.3 - ({m} + {last}) * 0.7 - {replica}")
    made.compute(lambda fields, _: on_stages(fields, batches))


def pipeline(schedule: str, ranks: int, chunks: int, batches: int) -> Scenario:
    fields = {
        "schedule": schedule,
        "micro_batches": batches,
        "forward": "1 ms",
        "backward": "2 ms",
        "activation": FLOAT,
    }
    more = {} if schedule in ("gpipe", "1f1b") else {"chunks": chunks}
    tensors = {"grad": {**FLOAT, "copies": chunks, "value": 0}}
    program = [{"pipeline": {**fields, **more, "gradient": "grad"}}]
    made = Trained(
        Scenario(
            world=ranks, mesh={"pp": ranks}, tensors=tensors, program=program, iterations=STEPS
        )
    )
    fill_stages(made, schedule, ranks, chunks, batches // 2 if schedule == "dualpipe" else batches)
    updates = [(f"w_{c}", f"w_{c} - {RATE} * grad_{c}") for c in range(chunks)]
    made.program += assigns([*updates, *((f"grad_{c}", "0") for c in range(chunks))])
    return made.scenario()


# --- tensor parallelism: two layers of a column and a row matrix each ---
LAYERS, TARGET = 2, "index * 0.3 - 1"


def on_pairs(saved: str, target: str) -> Any:
    """Arithmetic of the k-th layer; ``saved`` is the tensor that its input stands in, ``target``
    what the last output should be.
    """

    def arithmetic(fields: dict[str, Any], k: int) -> Assigns:
        if fields["name"] == "forward":
            kept = [(f"x_{k}", saved)] if k or saved != "tensor_parallel_out" else []
            return [
                *kept,
                (f"h_{k}", f"a_{k} * x_{k}"),
                ("tensor_parallel_out", f"b_{k} * (h_{k} * h_{k})"),
            ]
        layer = LAYERS - 1 - k
        gradient = target if k == 0 else saved.replace("out", "grad").replace("whole", "grad_whole")
        return [
            ("g", gradient),
            (f"db_{layer}", f"g * (h_{layer} * h_{layer})"),
            ("gh", f"g * b_{layer} * 2 * h_{layer}"),
            (f"da_{layer}", f"gh * x_{layer}"),
            ("tensor_parallel_grad", f"gh * a_{layer}"),
        ]

    return arithmetic


def tensor_parallel(ranks: int, sequence_parallel: bool) -> Scenario:
    shape, part = [ranks, 1, SIZE], [1, 1, SIZE]
    fields = {
        "layers": LAYERS,
        "pairs": 1,
        "sequence": ranks,
        "hidden": SIZE,
        "dtype": "float64",
        "forward": "1 ms",
        "backward": "2 ms",
        "sequence_parallel": sequence_parallel,
    }
    made = Trained(
        Scenario(
            world=ranks, mesh={"tp": ranks}, program=[{"tensor_parallel": fields}], iterations=STEPS
        )
    )
    for k in range(LAYERS):
        made.tensor(f"a_{k}", shape, f"1 - tp * 0.25 + index * 0.0625 - {k} * 0.5")
        made.tensor(f"b_{k}", shape, f"0.5 + tp * 0.25 - index * 0.03125 + {k} * 0.25")
        for name in (f"da_{k}", f"db_{k}", f"h_{k}"):
            made.tensor(name, shape)
        made.tensor(f"x_{k}", shape, "1 - index * 0.0625")
    for name in ("g", "gh"):
        made.tensor(name, shape)
    saved = "tensor_parallel_whole" if sequence_parallel else "tensor_parallel_out"
    made.compute(
        on_pairs(
            saved,
            "tensor_parallel_grad_whole"
            if sequence_parallel
            else f"tensor_parallel_out - ({TARGET})",
        )
    )
    if sequence_parallel:
        made.tensors["tensor_parallel_part"]["shape"] = part
        index = f"(tp * {SIZE} + index)"
        loss = assigns(
            [
                (
                    "tensor_parallel_grad_part",
                    f"tensor_parallel_part - ({TARGET.replace('index', index)})",
                )
            ]
        )
        start = assigns([("tensor_parallel_part", f"1 - {index} * 0.0625")])
        back = next(
            k
            for k, e in enumerate(made.program)
            if "grad_part" in str(e.get("all_gather_into_tensor", ""))
        )
        made.program = [*start, *made.program[:back], *loss, *made.program[back:]]
    made.program += assigns(
        [(f"{w}_{k}", f"{w}_{k} - {RATE} * d{w}_{k}") for w in "ab" for k in range(LAYERS)]
    )
    return made.scenario()


# --- expert parallelism: two layers, one expert per rank ---
EXPERTS = {
    "tokens": 6,
    "hidden": 2,
    "seed": 1,
    "dtype": "float64",
    "forward": "1 ms",
    "backward": "2 ms",
}


def on_experts(fields: dict[str, Any], k: int) -> Assigns:
    layer = LAYERS - 1 - k
    if fields["name"] == "router":
        return [("expert_parallel_tokens", "expert_parallel_combined" if k else "x")]
    if fields["name"] == "experts":
        return [
            (f"kept_{k}", "expert_parallel_routed"),
            ("expert_parallel_results", f"w_{k} * expert_parallel_routed"),
        ]
    if fields["name"] == "combine backward":
        return [
            (
                "expert_parallel_combined_grad",
                "expert_parallel_tokens_grad" if k else "expert_parallel_combined - t",
            )
        ]
    given = "expert_parallel_results_grad"
    return [
        (f"dw_{layer}", f"{given} * kept_{layer}"),
        ("expert_parallel_routed_grad", f"{given} * w_{layer}"),
    ]


def experts(ranks: int, imbalance: float) -> tuple[Scenario, list[int]]:
    """The program, and the tokens that every rank sends to each expert."""
    fields = {"experts": ranks, "layers": LAYERS, "imbalance": imbalance, **EXPERTS}
    made = Trained(
        Scenario(
            world=ranks, mesh={"ep": ranks}, program=[{"expert_parallel": fields}], iterations=STEPS
        )
    )
    sent = next(
        e["all_to_all_single"]
        for e in made.program
        if "tokens" in str(e.get("all_to_all_single", ""))
    )
    routed, tokens = (
        made.tensors[f"expert_parallel_{word}"]["shape"] for word in ("routed", "tokens")
    )
    for k in range(LAYERS):
        made.tensor(f"w_{k}", routed, f"1 - rank * 0.25 + index * 0.0625 + {k} * 0.5")
        made.tensor(f"dw_{k}", routed)
        made.tensor(f"kept_{k}", routed)
    made.tensor("x", tokens, "1 + rank - index * 0.125")
    made.tensor("t", tokens, "index * 0.3 - rank")
    made.compute(on_experts)
    made.program += assigns([(f"w_{k}", f"w_{k} - {RATE} * dw_{k}") for k in range(LAYERS)])
    return made.scenario(), sent.get("input_splits") or [EXPERTS["tokens"] // ranks] * ranks


# --- context parallelism: y = sum over the ring of q * kv_j^2, kv_j = w_j * x_j ---
def on_ring(fields: dict[str, Any], _: int) -> Assigns:
    name, i = fields["name"].rpartition(" ")[0], fields["name"].rpartition(" ")[2]
    kv = f"context_parallel_kv_{i}"
    if name == "attention":
        return [("y", f"{'y + ' if i != '0' else ''}q * ({kv} * {kv})")]
    if name == "attention backward":
        return [("g", f"(y - t) * q * 2 * {kv}")]
    if fields["name"] == "keys and values":
        return [("context_parallel_kv_0", "w * x")]
    return [(label, "g") for label in fields.get("writes", [])] + [
        (label, f"{label} + g") for label in fields.get("adds", [])
    ]


def ring(ranks: int, rotate: str) -> Scenario:
    fields = {
        "keys": [SIZE],
        "dtype": "float64",
        "rotate": rotate,
        "forward": "1 ms",
        "backward": "2 ms",
    }
    made = Trained(
        Scenario(
            world=ranks,
            mesh={"cp": ranks},
            program=[{"context_parallel": fields}],
            iterations=STEPS,
        )
    )
    given = {
        "w": "1 - rank * 0.25 + index * 0.0625",
        "x": "1 + rank - index * 0.125",
        "q": "0.5 + index * 0.1 - rank",
        "t": "index * 0.3 - rank",
        "y": None,
        "g": None,
    }
    for name, value in given.items():
        made.tensor(name, [2 * SIZE], value)
    made.compute(on_ring)
    made.program += assigns([("w", f"w - {RATE} * (context_parallel_grad_{ranks} * x)")])
    return made.scenario()


# --- torch.nn.DataParallel: one layer, a row of the batch for each device ---
def on_devices(fields: dict[str, Any], _: int) -> Assigns:
    word = "data_parallel_"
    return {
        "master copy": [(f"{word}weights_0", "1 + index * 0.25")],
        "next batch": [(f"{word}batch", "2 - index * 0.125 + iteration * 0.5")],
        "forward layer 0": [],
        "output": [(f"{word}output", f"{word}weights_0 * {word}part")],
        "loss": [(f"{word}output_grads", f"{word}outputs - t")],
        "backward layer 0": [(f"{word}grads_0", f"{word}output_grad * {word}part")],
        "optimizer": [(f"{word}weights_0", f"{word}weights_0 - {RATE} * {word}grads_0")],
    }[fields["name"]]


def devices(ranks: int) -> Scenario:
    layer = {"params": [[SIZE]], "forward": "1 ms", "backward": "2 ms"}
    fields = {"layers": layer, "dtype": "float64", "batch": [ranks, SIZE], "output": [ranks, SIZE]}
    made = Trained(Scenario(world=ranks, program=[{"data_parallel": fields}], iterations=STEPS))
    made.tensor("t", [ranks, 1, SIZE], "index * 0.3")
    made.compute(on_devices)
    return made.scenario()


# --- products ---
def replicated_pipeline(stages: int, replicas: int, batches: int) -> Scenario:
    pipe = {
        "schedule": "1f1b",
        "micro_batches": batches,
        "forward": "1 ms",
        "backward": "2 ms",
        "activation": FLOAT,
    }
    program = [
        {"hybrid": {"pipeline": pipe, "data": "dp", "gradient": "grad", "optimizer": "1 ms"}}
    ]
    tensors, mesh = {"grad": {**FLOAT, "value": 0}}, {"pp": stages, "dp": replicas}
    made = Trained(
        Scenario(
            world=stages * replicas, mesh=mesh, tensors=tensors, program=program, iterations=STEPS
        )
    )
    update = made.program.pop()
    assert update["compute"]["name"] == "optimizer"
    fill_stages(made, "1f1b", stages, 1, batches, "dp")
    made.program += assigns([("w_0", f"w_0 - {RATE} * grad"), ("grad", "0")])
    return made.scenario()


def replicated_tensor_parallel() -> Scenario:
    """One layer whose column and row matrix are the same weights, on two ranks; two replicas of
    it.
    """
    fields = {
        "pairs": 1,
        "sequence": 2,
        "hidden": SIZE,
        "dtype": "float64",
        "forward": "1 ms",
        "backward": "2 ms",
    }
    shape = [2, 1, SIZE]
    tensors = {"grad": {"shape": shape, "dtype": "float64"}}
    program = [
        {"hybrid": {"tensor": fields, "data": "dp", "gradient": "grad", "optimizer": "1 ms"}}
    ]
    made = Trained(
        Scenario(
            world=4, mesh={"dp": 2, "tp": 2}, tensors=tensors, program=program, iterations=STEPS
        )
    )
    made.tensor("w", shape, "1 - tp * 0.25 + index * 0.0625")
    made.tensor("x", shape, "1 + dp - index * 0.0625")
    for name in ("h", "g"):
        made.tensor(name, shape)

    def arithmetic(fields: dict[str, Any], _: int) -> Assigns:
        if fields["name"] == "forward":
            return [("h", "w * x"), ("tensor_parallel_out", "w * (h * h)")]
        if fields["name"] == "backward":
            back = [
                ("g", f"tensor_parallel_out - ({TARGET})"),
                ("grad", "g * (h * h) + g * w * 2 * h * x"),
            ]
            return [*back, ("tensor_parallel_grad", "g * w * 2 * h * w")]
        return [("w", f"w - {RATE} * grad")]

    made.compute(arithmetic)
    return made.scenario()
