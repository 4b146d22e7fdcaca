"""Names that the arguments of torch.distributed have in a scenario file."""

from __future__ import annotations

#: torch's argument -> the file's field, where they are called otherwise; by operation, then for
#: all. Empty: nothing stands for it.
TORCH_ARGUMENTS: dict[str, str] = {
    "async_op": "async",
    "input_split_sizes": "input_splits",
    "output_split_sizes": "output_splits",
    "output_tensor": "output",
    "input_tensor": "input",
    "output_tensor_list": "output",
    "input_tensor_list": "input",
    "input_list": "input",
    "p2p_op_list": "ops",
    "peer": "dst",
    "group_peer": "group_dst",
    "all_gather.tensor_list": "output",
    "all_gather.tensor": "input",
    "gather.tensor": "input",
    "gather.gather_list": "output",
    "scatter.tensor": "output",
    "scatter.scatter_list": "input",
    "wait.timeout": "",
    "barrier.timeout": "",
    "device_ids": "",
    "pg_options": "",
    "group_desc": "",
    "group_name": "",
    "timeout": "",
    "async_ops": "async",
    "inputs": "input",
    "outputs": "output",
    "tensors": "tensor",
    "reduceOp": "op",
    "reduce_op": "op",
    "seconds": "time",
}


def torch_argument_names(op: str, fields: frozenset[str] | set[str]) -> dict[str, str]:
    """torch's arguments of an operation that the file calls otherwise, or (empty) has no field
    for.
    """
    found: dict[str, str] = {}
    for name, field in TORCH_ARGUMENTS.items():
        row, _, argument = name.rpartition(".")
        if row in ("", op) and argument not in fields and (field == "" or field in fields):
            found[argument] = field
    return found


__all__ = ["TORCH_ARGUMENTS", "torch_argument_names"]
