"""`--check-values` finds silent errors: the calls match, but the model trains on wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distsim import testing
from distsim.findings.codes import CODES
from distsim.findings.finding_types import Finding
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not is_supported(), reason="hangs are detected from Linux's /proc")

DDP = torch.nn.parallel.DistributedDataParallel


def model_of(*names: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})


class Stack(torch.nn.Module):
    """Linear layers in the order of ``names``."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.layers = model_of(*names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def batch(step: int) -> torch.Tensor:
    """Different data on each rank."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(2, 4, generator=generator)


def train(
    step_fault: Callable[[DDP, torch.optim.Optimizer, int], None] = lambda *_: None,
    optimizer_class: type = torch.optim.AdamW,
) -> None:
    model = DDP(Stack("ab"))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    for step in range(4):
        model(batch(step)).square().sum().backward()
        step_fault(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()


# --- ten silent errors ---
def parameter_is_changed_on_one_rank() -> None:
    def fault(model, optimizer, step):
        if step == 2 and dist.get_rank() == 1:
            model.module.layers["b"].weight.data.mul_(1.5)

    train(fault)


def checkpoint_is_loaded_on_one_rank() -> None:
    model = DDP(Stack("ab"))
    if dist.get_rank() == 0:
        model.module.load_state_dict({k: v + 1 for k, v in model.module.state_dict().items()})
    model(batch(0)).sum().backward()


def gradients_are_never_synchronised() -> None:
    model = DDP(Stack("ab"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    for step in range(2):
        with model.no_sync():
            model(batch(step)).sum().backward()
        optimizer.step()


def inner_module_is_called() -> None:
    model = DDP(Stack("ab"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module(batch(0)).sum().backward()
    optimizer.step()


def gradient_is_clipped_on_one_rank() -> None:
    def fault(model, optimizer, step):
        if dist.get_rank() == 1:
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    train(fault)


def learning_rate_differs() -> None:
    def fault(model, optimizer, step):
        if step == 1:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + dist.get_rank())

    train(fault)


def optimizer_state_is_reset_on_one_rank() -> None:
    def fault(model, optimizer, step):
        if step == 2 and dist.get_rank() == 0:
            optimizer.state[model.module.layers["a"].weight]["exp_avg"].zero_()

    train(fault)


def parameters_are_registered_in_another_order() -> None:
    model = DDP(Stack("ab" if dist.get_rank() == 0 else "ba"))
    model(batch(0)).sum().backward()


def fsdp_units_are_swapped() -> None:
    from torch.distributed.fsdp import fully_shard

    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    for layer in layers:
        fully_shard(layer)
    x = torch.ones(2, 8)
    for number, layer in enumerate(layers):
        if number != dist.get_rank():
            x = layer(x)
    x.sum().backward()


def units_of_fsdp1_are_swapped() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu")
    layers = [FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=device) for _ in range(3)]
    x = torch.ones(2, 8)
    for number, layer in enumerate(layers):
        if number != dist.get_rank():
            x = layer(x)
    x.sum().backward()


def replicated_dtensor_is_changed_on_one_rank() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    norm = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([norm], lr=0.1)
    if dist.get_rank() == 1:
        norm.data.to_local().add_(1)
    optimizer.step()


class RowParallel(torch.nn.Module):
    """A product whose terms are on several ranks, summed, with a dropout of the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial_sum = torch.nn.functional.dropout(x * (dist.get_rank() + 1)) @ self.weight
        y = partial_sum.detach().clone()
        dist.all_reduce(y)
        return torch.nn.functional.dropout(y, 0.5)


def random_states_of_tensor_parallel_ranks_drift() -> None:
    torch.manual_seed(0)
    layer = RowParallel()
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            torch.rand(1)
        layer(torch.ones(2, 4))


SILENT_ERRORS = [
    (
        random_states_of_tensor_parallel_ranks_drift,
        "the random state of rank 1 differs",
        "dropout 6\n  the states were still equal at dropout 4",
        "return torch.nn.functional.dropout(y, 0.5)",
    ),
    (parameter_is_changed_on_one_rank, "layers.b.weight", "forward pass 4", "model(batch(step))"),
    (checkpoint_is_loaded_on_one_rank, "layers.a.weight", "forward pass 1", "model(batch(0))"),
    (gradients_are_never_synchronised, "layers.a.weight", "optimizer step 1", "optimizer.step()"),
    (inner_module_is_called, "layers.a.weight", "optimizer step 1", "optimizer.step()"),
    (gradient_is_clipped_on_one_rank, "layers.a.weight", "optimizer step 1", "optimizer.step()"),
    (learning_rate_differs, "layers.a.weight", "optimizer step 2", "optimizer.step()"),
    (optimizer_state_is_reset_on_one_rank, "layers.a.weight", "step 3", "optimizer.step()"),
    (parameters_are_registered_in_another_order, "layers.a.weight", "together", "model = DDP("),
    (fsdp_units_are_swapped, "unit 1", "all_gather 1 of FSDP", "x = layer(x)"),
    (units_of_fsdp1_are_swapped, "unit 1", "all_gather 1 of FSDP", "x = layer(x)"),
    (replicated_dtensor_is_changed_on_one_rank, "0 of group 0", "step 1", "optimizer.step()"),
]


@pytest.mark.parametrize(("program", "name", "step", "line"), SILENT_ERRORS)
def test_a_silent_error_is_found_with_parameter_step_and_line(program, name, step, line) -> None:
    outcome, (finding, *others) = values_of(program)

    assert outcome == "wrong-data"
    assert not others
    assert name in finding.message
    assert step in finding.message
    assert len(finding.core) == 1
    assert line in source_text(finding.places[0].file, finding.places[0].line)


# --- correct programs ---
def gradient_accumulation() -> None:
    model = DDP(Stack("ab"))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        if step % 2 == 0:
            with model.no_sync():
                model(batch(step)).sum().backward()
            continue
        model(batch(step)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def sharded_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(Stack("abc"))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for step in range(3):
        model(batch(step)).sum().backward()
        optimizer.step()


def batch_norm() -> None:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch(step)).square().sum().backward()
        optimizer.step()


def sharded_model() -> None:
    from torch.distributed.fsdp import fully_shard

    model = Stack("abc")
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(batch(step)).sum().backward()
        optimizer.step()


def sharded_model_of_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({torch.nn.Linear})
    device = torch.device("cpu")
    model = FullyShardedDataParallel(Stack("abc"), auto_wrap_policy=policy, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(batch(step)).sum().backward()
        optimizer.step()


def uneven_batches() -> None:
    from torch.distributed.algorithms.join import Join

    model = DDP(Stack("ab"))
    with Join([model]):
        for step in range(2 + dist.get_rank()):
            model(batch(step)).sum().backward()


def tensor_parallel_dropout() -> None:
    torch.manual_seed(0)
    layer = RowParallel()
    for _ in range(2):
        layer(torch.ones(2, 4))


def data_parallel_dropout_of_equal_batches() -> None:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()))
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    "program",
    [
        train,
        tensor_parallel_dropout,
        data_parallel_dropout_of_equal_batches,
        gradient_accumulation,
        sharded_optimizer,
        batch_norm,
        sharded_model,
        sharded_model_of_fsdp1,
        uneven_batches,
    ],
)
def test_a_correct_program_has_no_finding(program) -> None:
    assert values_of(program) == ("completes", [])


def test_without_the_option_no_value_is_compared() -> None:
    judged = testing.run(parameter_is_changed_on_one_rank, 2, check=False)

    assert [f for f in judged.simulation.findings if f.code == "DS612"] == []
    assert not any(process.values for process in judged.captured.ranks.values())


def test_the_page_of_the_finding_shows_a_program_that_has_it(tmp_path, cli) -> None:
    (tmp_path / "train.py").write_text(CODES["DS612"].example, encoding="utf-8")

    words = ("capture", "--check-values", "--nproc", "2", "--", "python", "train.py")
    done = cli(*words, cwd=tmp_path)

    assert done.returncode == 1, done.stdout
    assert done.stdout.startswith("train.py: wrong-data")
    assert "DS612" in done.stdout


def values_of(program: Callable[[], None]) -> tuple[str, list[Finding]]:
    """The outcome, and the findings about values."""
    judged = testing.run(program, 2, check=False, check_values=True)

    assert all(status.state == "ended" for status in judged.stands), testing.failure_text(judged)
    found = [finding for finding in judged.simulation.findings if finding.code == "DS612"]
    return judged.outcome, found
