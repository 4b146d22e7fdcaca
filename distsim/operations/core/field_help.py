"""What the fields of steps mean, each in a sentence, with an example: descriptions of the Pydantic
fields.

The key is a field as the file has it, or ``operation.field`` where it means something of its own
there. Schema, pages, hover texts and `distsim explain` read them from the models
(`distsim.common.field_parsing.describe_fields`).
"""

from __future__ import annotations

from distsim.common.field_parsing import FieldHelp

OPERATION_FIELD_HELP: dict[str, FieldHelp] = {
    "tensor": FieldHelp(
        (
            "The tensor that is sent, received into or worked on in place: a name, a copy "
            "`name@index`, or an inline shape."
        ),
        "x",
    ),
    "input": FieldHelp(
        (
            "What this rank gives: a tensor, or where torch takes a list one with a leading axis "
            "of the group's size."
        ),
        "x",
    ),
    "output": FieldHelp(
        (
            "Where this rank gets: a tensor, or where torch takes a list one with a leading axis "
            "of the group's size."
        ),
        "all_x",
    ),
    "all_gather.output": FieldHelp(
        (
            "Room for everybody's input: a tensor with a leading axis of the group's size, or a "
            "list of names."
        ),
        "all_x",
    ),
    "all_to_all.input": FieldHelp(
        (
            "One part for each rank: a tensor with a leading axis of the group's size, or a list "
            "of names."
        ),
        "parts",
    ),
    "all_to_all.output": FieldHelp(
        (
            "Room for one part of each rank: with a leading axis of the group's size, or a list "
            "of names."
        ),
        "got",
    ),
    "reduce_scatter.input": FieldHelp(
        (
            "One part for each rank: a tensor with a leading axis of the group's size, or a list "
            "of names."
        ),
        "parts",
    ),
    "gather.output": FieldHelp(
        "Room on `dst` for everybody's input; the other ranks need none.", "all_x"
    ),
    "scatter.input": FieldHelp(
        "One part for each rank, on `src`; the other ranks need none.", "parts"
    ),
    "group": FieldHelp(
        (
            "Who takes part: `world` (if left out), an axis of the mesh, a list of axes, a group "
            "of `groups` or of new_group."
        ),
        "dp",
    ),
    "into": FieldHelp(
        (
            "What is written: the other rank's tensor of a put, this rank's of a get; left out, "
            "of the same name."
        ),
        "y@rank",
    ),
    "channel": FieldHelp(
        "Which cell of the signal pad, 0 or more: signals of one channel meet in order.", 1
    ),
    "tag": FieldHelp("Tells messages of one pair apart, 0 to 2**31 - 1; nccl ignores it.", 7),
    "on": FieldHelp(
        (
            "The CUDA stream that is current at the call; `current` is the default one. It means "
            "something under nccl."
        ),
        "comm",
    ),
    "compute.on": FieldHelp(
        (
            "The CUDA stream that it runs on; `host` keeps the host busy, `current` is the "
            "default stream."
        ),
        "side",
    ),
    "wait_stream.on": FieldHelp("The stream that waits; left out, the current one.", "current"),
    "stream": FieldHelp("The stream that is waited for.", "comm"),
    "src": FieldHelp(
        (
            "The rank that sends or gives, by its global number. A recv without it takes any "
            "rank's message."
        ),
        0,
    ),
    "dst": FieldHelp(
        "The rank that receives or gets, by its global number.", "(rank + 1) % world_size"
    ),
    "group_src": FieldHelp("The rank that sends or gives, by its number in the group.", 0),
    "group_dst": FieldHelp(
        "The rank that receives or gets, by its number in the group.", "group_rank + 1"
    ),
    "assume_src": FieldHelp(
        (
            "Of a receive from any source: the sender to assume, where the order of arrivals is "
            "to be fixed."
        ),
        1,
    ),
    "as": FieldHelp(
        (
            "The handle that stands for the request, for a later `wait`: a name, or `name@index` "
            "in a repeat."
        ),
        "h",
    ),
    "async": FieldHelp("Start the collective and go on; `as` names the request.", True),
    "op": FieldHelp("How contributions are combined; `ReduceOp.SUM` is taken too.", "avg"),
    "input_splits": FieldHelp(
        "Rows of the input for each rank of the group, in its order; left out: even parts.", [1, 3]
    ),
    "output_splits": FieldHelp(
        (
            "Rows of the output from each rank of the group; left out: what the others' "
            "`input_splits` give."
        ),
        [1, 3],
    ),
    "timeout": FieldHelp("How long it may wait before it raises.", "30 s"),
    "wait_all_ranks": FieldHelp(
        "Wait for everybody, and name all ranks that are missing, not the first alone.", True
    ),
    "ops": FieldHelp(
        "The isend and irecv steps of the batch, in the list's order.",
        [{"isend": {"tensor": "x", "dst": 1}}],
    ),
    "handles": FieldHelp(
        "The handle to wait for, a list of them, or `all`: every request that is open.", "h"
    ),
    "value": FieldHelp(
        (
            "What the tensor holds then: a number, an expression over tensors, rank and index, "
            "or a list."
        ),
        "2 * x + rank",
    ),
    "time": FieldHelp("How long it takes.", "3 ms"),
    "flops": FieldHelp("Floating-point operations, which the cluster's device prices.", "2 TFLOP"),
    "bytes": FieldHelp(
        "Bytes that are read and written in the device's memory, which the device prices.",
        "4 B * width",
    ),
    "kernels": FieldHelp(
        "Kernels that the work is done in, each of which takes the device's launch; left out, one.",
        7,
    ),
    "name": FieldHelp("What reports and pictures call it.", "forward"),
    "new_group.name": FieldHelp("What later steps call the group.", "pair"),
    "reads": FieldHelp("Tensors that it needs: it must not overlap a transfer into them.", ["x"]),
    "writes": FieldHelp("Tensors that it makes anew.", ["y"]),
    "adds": FieldHelp("Tensors that it adds to, as a backward pass does to gradients.", ["grad"]),
    "dtype": FieldHelp(
        "What the floating-point operations are done in, for the device's price.", "bfloat16"
    ),
    "code": FieldHelp("The exit status; 0 is a clean end.", 0),
    "message": FieldHelp("The exception's text.", "out of memory"),
    "backend": FieldHelp(
        "The back end of the group: gloo, nccl, mpi; left out, the scenario's.", "gloo"
    ),
    "init_method": FieldHelp(
        "Where the ranks meet: `env://`, `tcp://host:port` or `file:///path`.", "env://"
    ),
    "store": FieldHelp(
        (
            "In place of init_method: `tcp://host:port`, `file:///path`, or `hash` (one of this "
            "process alone)."
        ),
        "hash",
    ),
    "new_group.store": FieldHelp(
        "A prefix of the store where its members alone meet, as torchft has one for each quorum.",
        "torchft/3",
    ),
    "rank": FieldHelp("Which number the process says it has; left out, env:// reads RANK.", "rank"),
    "world_size": FieldHelp(
        "How many ranks it says there are; left out, env:// reads WORLD_SIZE.", "world_size"
    ),
    "device_id": FieldHelp(
        "The index of its GPU, which makes nccl's communicators at once.", "local_rank"
    ),
    "ranks": FieldHelp("Global ranks of the members; left out: all. torch sorts them.", [0, 1]),
    "use_local_synchronization": FieldHelp(
        "Only the members make the call and wait for each other.", True
    ),
}

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


__all__ = ["TORCH_ARGUMENTS", "OPERATION_FIELD_HELP", "torch_argument_names"]
