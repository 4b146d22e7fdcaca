"""Each operation's example as torch writes it, to stand beside the file's form. `dist` is torch.distributed; sizes and ranks as there."""

from __future__ import annotations

#: Operation -> the lines of Python that do what its example does.
TORCH_CALLS: dict[str, str] = {
    "irecv": "if rank == 1:\n    h = dist.irecv(x, src=0)",
    "isend": "if rank == 0:\n    h = dist.isend(x, dst=1)",
    "recv": "if rank == 1:\n    dist.recv(x, src=0)",
    "send": "if rank == 0:\n    dist.send(x, dst=1)",
    "all_gather": "dist.all_gather(list(all_x), x)  # all_x: world_size times the shape of x",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(all_x, x)",
    "all_gather_into_tensor_coalesced": (
        "with dist._coalescing_manager():\n    dist.all_gather_into_tensor(all_w, w)\n    dist.all_gather_into_tensor(all_b, b)"
    ),
    "all_reduce": "dist.all_reduce(x, op=dist.ReduceOp.SUM)",
    "all_reduce_coalesced": (
        "with dist._coalescing_manager():\n    dist.all_reduce(weight_grad, op=dist.ReduceOp.AVG)\n"
        "    dist.all_reduce(bias_grad, op=dist.ReduceOp.AVG)"
    ),
    "all_to_all": "dist.all_to_all(list(got), list(parts))",
    "all_to_all_single": "dist.all_to_all_single(got, all_x)",
    "barrier": "dist.barrier()",
    "broadcast": "dist.broadcast(x, src=0)",
    "gather": "dist.gather(x, list(all_x) if rank == 0 else None, dst=0)",
    "monitored_barrier": "dist.monitored_barrier(timeout=timedelta(seconds=10))",
    "reduce": "dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)",
    "reduce_scatter": "dist.reduce_scatter(x, list(parts), op=dist.ReduceOp.SUM)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(x, all_x, op=dist.ReduceOp.SUM)",
    "reduce_scatter_tensor_coalesced": (
        "with dist._coalescing_manager():\n    dist.reduce_scatter_tensor(w, all_w)\n    dist.reduce_scatter_tensor(b, all_b)"
    ),
    "scatter": "dist.scatter(x, list(parts) if rank == 0 else None, src=0)",
    "batch_isend_irecv": (
        "sent = dist.P2POp(dist.isend, x, (rank + 1) % world_size)\n"
        "received = dist.P2POp(dist.irecv, y, (rank - 1) % world_size)\n"
        "for work in dist.batch_isend_irecv([sent, received]):\n    work.wait()"
    ),
    "wait": "if rank == 0:\n    h = dist.isend(x, dst=1)\n    h.wait()",
    "assign": "y.copy_(2 * x + rank)",
    "compute": "y = forward(x)",
    "exit": "if rank == 1:\n    sys.exit(0)",
    "fail": 'if rank == 1:\n    raise RuntimeError("out of memory")',
    "sleep": "time.sleep(0.003)",
    "synchronize": "torch.cuda.synchronize()",
    "wait_stream": "torch.cuda.current_stream().wait_stream(reduce)",
    "destroy_process_group": "dist.destroy_process_group()",
    "init_process_group": (
        'dist.init_process_group(\n    "gloo", init_method="tcp://127.0.0.1:29500", rank=rank, world_size=world_size, '
        "timeout=timedelta(seconds=30)\n)"
    ),
    "new_group": "pair = dist.new_group([0, 1])",
}

__all__ = ["TORCH_CALLS"]
