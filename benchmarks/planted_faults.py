"""The mistakes that `capture_faults.py` plants in the drivers of `capture_programs.py`.

They are mistakes that users make: a skipped pass, loaders of unequal length, an evaluation or a
checkpoint on one rank only, a wrong group or peer, a shape or dtype that differs.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """``old`` of a driver becomes ``new``.

    ``rank`` and ``line`` (text of it): where the ranks diverge. If the planted line makes no call,
    ``line`` is the call that fails because of it. ``remedy``: words of the first finding's help, if
    a person judged that the help says what to change; "" if it does not, or was not judged.
    """

    name: str
    words: tuple[str, ...]
    ranks: int
    old: str
    new: str
    rank: int
    line: str
    remedy: str = ""
    options: tuple[str, ...] = ()


ZERO_1 = ("deepspeed_zero.py", "1")
ZERO_3 = ("deepspeed_zero.py", "3")
MEGATRON = ("megatron_gpt.py",)
IGNITE = ("ignite_engine.py",)
LIGHTNING = ("lightning_boring.py", "ddp")
TRAINER = ("transformers_trainer.py", "ddp")
TRAINER_FSDP = ("accelerate", "transformers_trainer.py", "fsdp")
ACCELERATE = ("accelerate_loop.py",)
FABRIC = ("fabric_loop.py",)
MMENGINE = ("mmengine_runner.py",)
PIPELINE = ("pipelined_gpt2.py",)

END = "torch.distributed.destroy_process_group()"
ON_0 = "if torch.distributed.get_rank() == 0:"
ON_1 = "if torch.distributed.get_rank() == 1:"

DEEPSPEED_FAULTS = (
    Fault(
        "a rank skips backward",
        ZERO_1,
        2,
        "    engine.backward(loss)\n",
        "    if torch.distributed.get_rank() == 0 or _ != 1:\n        engine.backward(loss)\n",
        0,
        "engine.backward(loss)",
        "take the same branch",
    ),
    Fault(
        "save behind rank 0",
        ZERO_1,
        2,
        END,
        f"{ON_0}\n    engine.save_checkpoint('saved')\n{END}",
        0,
        "engine.save_checkpoint",
        "move line 25 out of it",
    ),
    Fault(
        "new_group by members only",
        ZERO_1,
        2,
        END,
        f"{ON_0}\n    torch.distributed.new_group([0])\n"
        "pair = torch.distributed.new_group([0, 1])\n"
        f"torch.distributed.barrier(pair)\n{END}",
        0,
        "torch.distributed.new_group([0])",
        "move the extra call new_group",
    ),
    Fault(
        "an early break on one rank",
        ZERO_1,
        2,
        "    engine.step()\n",
        f"    engine.step()\n    {ON_1}\n        break\n",
        0,
        "engine",
        "take the same branch",
    ),
    Fault(
        "one batch more on one rank",
        ZERO_1,
        2,
        "for _ in range(3):",
        "for _ in range(3 + torch.distributed.get_rank()):",
        1,
        "engine",
        "run the loop at line 18 the same number of times",
    ),
    Fault(
        "a bad sample raises on one rank",
        ZERO_1,
        2,
        "    engine.step()\n",
        f"    {ON_1}\n        raise ValueError('corrupt sample')\n    engine.step()\n",
        1,
        "raise ValueError",
        "corrupt sample",
    ),
    Fault(
        "a rank skips a layer under ZeRO-3",
        ZERO_3,
        2,
        "    loss = engine(x).float().square().mean()\n",
        "    hidden = net[1](net[0](x))\n"
        "    if torch.distributed.get_rank() == 0 or _ != 1:\n        hidden = net[2](hidden)\n"
        "    loss = hidden.float().square().mean()\n",
        0,
        "hidden = net[2](hidden)",
        "take the same branch at line 21",
    ),
    Fault(
        "a rank ends before the last step",
        ZERO_3,
        2,
        "    engine.backward(loss)\n",
        f"    if _ == 2:\n        {ON_1}\n            sys.exit(0)\n    engine.backward(loss)\n",
        1,
        "sys.exit(0)",
        "take the same branch at line 22",
    ),
)
MEGATRON_FAULTS = (
    Fault(
        "wrong group",
        MEGATRON,
        4,
        END,
        "group = parallel_state.get_tensor_model_parallel_group() if torch.distributed.get_rank() != 3 else None\n"
        f"torch.distributed.all_reduce(torch.ones(4, device='cuda'), group=group)\n{END}",
        3,
        "group=group",
        "on TENSOR_MODEL_PARALLEL_GROUP instead of world",
    ),
    Fault(
        "swapped pipeline order",
        MEGATRON,
        4,
        END,
        "other = (torch.distributed.get_rank() + 2) % 4\n"
        "torch.distributed.recv(torch.ones(4, device='cuda'), other)\n"
        f"torch.distributed.send(torch.ones(4, device='cuda'), other)\n{END}",
        0,
        "torch.distributed.recv(",
        "let rank 0 send before it receives",
    ),
    Fault(
        "a stage with fewer micro-batches",
        MEGATRON,
        4,
        "        num_microbatches=4,\n",
        "        num_microbatches=4 if parallel_state.is_pipeline_first_stage() else 3,\n",
        0,
        "losses = step(",
        "the same number of iterations or micro-batches",
    ),
    Fault(
        "a source that is not in the group",
        MEGATRON,
        4,
        END,
        "torch.distributed.broadcast(\n    torch.ones(4, device='cuda'), 0, parallel_state.get_tensor_model_parallel_group()\n)\n"
        + END,
        2,
        "torch.distributed.broadcast(",
        "pass a member's global rank as `src`",
    ),
    Fault(
        "two groups in different order",
        MEGATRON,
        4,
        END,
        "groups = [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()]\n"
        "for group in groups if torch.distributed.get_rank() in (0, 3) else groups[::-1]:\n"
        f"    torch.distributed.all_reduce(torch.ones(4, device='cuda'), group=group)\n{END}",
        0,
        "group=group",
        "use the groups in the same order on all ranks",
    ),
)
IGNITE_FAULTS = (
    Fault(
        "uneven batches without join",
        IGNITE,
        2,
        "loader = idist.auto_dataloader(data, batch_size=16, shuffle=True)",
        "loader = torch.utils.data.DataLoader(data, batch_size=8 * (1 + idist.get_rank()))",
        0,
        "loss.backward()",
        "equally often on all ranks",
    ),
    Fault(
        "a tag without its like",
        IGNITE,
        2,
        "    trainer.run(loader, max_epochs=2)",
        "    trainer.run(loader, max_epochs=1)\n    x = torch.ones(4, device=device)\n"
        "    torch.distributed.send(x, 1, tag=1) if idist.get_rank() == 0 else torch.distributed.recv(x, 0, tag=2)",
        1,
        "torch.distributed.recv(x, 0, tag=2)",
        "use the same tag in both calls",
        options=("--backend", "gloo"),  # nccl has no tags
    ),
    Fault(
        "a dtype that differs",
        IGNITE,
        2,
        "    trainer.run(loader, max_epochs=2)",
        "    trainer.run(loader, max_epochs=1)\n    kind = torch.float64 if idist.get_rank() else torch.float32\n"
        "    torch.distributed.all_reduce(torch.ones(4, dtype=kind, device=device))",
        0,
        "torch.distributed.all_reduce(",
        "cast to the same dtype on all members",
    ),
    Fault(
        "a forgotten wait",
        IGNITE,
        2,
        "    trainer.run(loader, max_epochs=2)",
        "    trainer.run(loader, max_epochs=1)\n    torch.distributed.all_reduce(torch.ones(4, device=device), async_op=True)",
        0,
        "async_op=True",
        "keep the Work and call wait()",
    ),
    Fault(
        "a barrier behind rank 0",
        IGNITE,
        2,
        "        idist.barrier()\n        if idist.get_rank() == 0:\n",
        "        if idist.get_rank() == 0:\n            idist.barrier()\n",
        0,
        "idist.barrier()",
        "take the same branch at line 31",
    ),
    Fault(
        "a metric computed on rank 0",
        IGNITE,
        2,
        '    Accuracy(device=device).attach(trainer, "accuracy")\n',
        '    if idist.get_rank() == 0:\n        Accuracy(device=device).attach(trainer, "accuracy")\n',
        0,
        "trainer.run(loader",
        "call the same functions in the same order",
    ),
    Fault(
        "each rank broadcasts from itself",
        IGNITE,
        2,
        "    trainer.run(loader, max_epochs=2)",
        "    seed = idist.broadcast(torch.ones(1, device=device), src=idist.get_rank())\n"
        "    trainer.run(loader, max_epochs=1)",
        0,
        "src=idist.get_rank()",
        "use the same one on all members",
    ),
)
LIGHTNING_FAULTS = (
    Fault(
        "a metric is synchronised on rank 0",
        LIGHTNING,
        2,
        "    def configure_optimizers(self):\n",
        "    def training_step(self, batch, batch_idx):\n"
        "        loss = super().training_step(batch, batch_idx)['loss']\n"
        "        if self.global_rank == 0:\n"
        "            self.log('loss', loss, sync_dist=True)\n"
        "        return loss\n\n"
        "    def configure_optimizers(self):\n",
        0,
        "self.log('loss', loss, sync_dist=True)",
        "take the same branch",
    ),
    Fault(
        "a checkpoint behind is_global_zero",
        LIGHTNING,
        2,
        "trainer.fit(Model())\n",
        "trainer.fit(Model())\nif trainer.is_global_zero:\n    trainer.save_checkpoint('last.ckpt')\n",
        0,
        "trainer.save_checkpoint(",
        "move it out of the branch that only rank 0 takes",
    ),
    Fault(
        "an empty batch skips the step of one rank",
        LIGHTNING,
        2,
        "    def configure_optimizers(self):\n",
        "    def training_step(self, batch, batch_idx):\n"
        "        if self.global_rank == 1 and batch_idx == 1:\n"
        "            return None\n"
        "        return super().training_step(batch, batch_idx)\n\n"
        "    def configure_optimizers(self):\n",
        0,
        "trainer.fit(",
        "Skipping the `training_step`",
    ),
    Fault(
        "validation gathers on rank 0",
        LIGHTNING,
        2,
        "    def configure_optimizers(self):\n",
        "    def on_validation_epoch_end(self):\n"
        "        if self.trainer.is_global_zero:\n"
        "            self.all_gather(self.layer.weight.sum())\n\n"
        "    def configure_optimizers(self):\n",
        0,
        "self.all_gather(",
        "move the extra call all_gather",
    ),
    Fault(
        "a loader with one batch less",
        LIGHTNING,
        2,
        "trainer.fit(Model())\n",
        "import os\n"
        "import torch\n"
        "class Rows(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter(torch.randn(2 - int(os.environ['LOCAL_RANK']), 32))\n"
        "trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 1, -1\n"
        "trainer.fit(Model(), torch.utils.data.DataLoader(Rows()))\n",
        0,
        "trainer.fit(",
        "uneven batches",
    ),
)
TRAINER_FAULTS = (
    Fault(
        "evaluation on rank 0",
        TRAINER,
        2,
        "Trainer(model=model, args=arguments, train_dataset=data).train()\n",
        "trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:9])\n"
        "trainer.train()\n"
        "if trainer.is_world_process_zero():\n    trainer.evaluate()\n",
        0,
        "trainer.evaluate()",
        "move it out of the branch that only rank 0 takes",
    ),
    Fault(
        "a sharded model is saved on rank 0",
        TRAINER_FSDP,
        2,
        "Trainer(model=model, args=arguments, train_dataset=data).train()\n",
        "trainer = Trainer(model=model, args=arguments, train_dataset=data)\n"
        "trainer.train()\n"
        "if trainer.is_world_process_zero():\n"
        "    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)\n",
        0,
        "trainer.accelerator.get_state_dict(",
        "move it out of the branch that only rank 0 takes",
    ),
    Fault(
        "one rank stops at its own loss",
        TRAINER,
        2,
        "Trainer(model=model, args=arguments, train_dataset=data).train()\n",
        "from transformers import TrainerCallback\n"
        "class Stop(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **more):\n"
        "        control.should_training_stop |= args.process_index == 1\n"
        "Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Stop()]).train()\n",
        0,
        "callbacks=[Stop()]).train()",
        "ends the loop early on one rank",
    ),
    Fault(
        "a layer is dropped on one rank under FSDP",
        TRAINER_FSDP,
        2,
        "rows = torch.randint(",
        "import os\n"
        "layer = model.model.layers[1]\n"
        "forward, layer.calls = layer.forward, 0\n"
        "def dropped(hidden_states, *args, **more):\n"
        "    return hidden_states if os.environ['RANK'] == '1' else forward(hidden_states, *args, **more)\n"
        "layer.forward = dropped\n"
        "rows = torch.randint(",
        0,
        "train_dataset=data).train()",
    ),
)
ACCELERATE_FAULTS = (
    Fault(
        "a high loss skips the step",
        ACCELERATE,
        2,
        "            accelerator.backward(loss)\n",
        "            if loss > 1.4:\n                continue\n            accelerator.backward(loss)\n",
        0,
        "accelerator.backward(loss)",
        "take the same branch",
    ),
    Fault(
        "evaluation on the main process",
        ACCELERATE,
        2,
        "    for x, y in held_out:\n",
        "    for x, y in held_out if accelerator.is_main_process else ():\n",
        0,
        "accelerator.gather_for_metrics((found, y))",
        "run the loop at line 27 the same number of times",
    ),
    Fault(
        "waiting inside the main process",
        ACCELERATE,
        2,
        "accelerator.wait_for_everyone()\nif accelerator.is_main_process:\n",
        "if accelerator.is_main_process:\n    accelerator.wait_for_everyone()\n",
        0,
        "accelerator.wait_for_everyone()",
        "move line 38 out of it",
    ),
    Fault(
        "early stopping without a trigger",
        ACCELERATE,
        2,
        "    if accelerator.check_trigger():\n        break\n",
        "    if accelerator.process_index == 1 and right < 40:\n        break\n",
        0,
        "if accelerator.process_index == 1 and right < 40:",
        "take the same branch at line 35",
    ),
    Fault(
        "an unprepared loader, sharded by hand",
        ACCELERATE,
        2,
        "model, optimizer, train, held_out = accelerator.prepare(net, optimizer, train, held_out)\n",
        "own = torch.utils.data.Subset(data, range(accelerator.process_index, 33, 2))\n"
        "device = accelerator.device\n"
        "train = [(x.to(device), y.to(device)) for x, y in DataLoader(own, batch_size=4)]\n"
        "model, optimizer, held_out = accelerator.prepare(net, optimizer, held_out)\n",
        0,
        "accelerator.backward(loss)",
        "run the loop at line 23 the same number of times",
    ),
    Fault(
        "results of unequal length are gathered",
        ACCELERATE,
        2,
        "        found, y = accelerator.gather_for_metrics((found, y))\n",
        "        found = accelerator.gather(found[found == y])\n        y = found\n",
        0,
        "accelerator.gather(found[found == y])",
        "same shape on all members",
    ),
)
FABRIC_FAULTS = (
    Fault(
        "a checkpoint behind global_rank 0",
        FABRIC,
        2,
        "    fabric.save(f",
        "    if fabric.global_rank == 0:\n        fabric.save(f",
        0,
        "fabric.save(",
        "take the same branch",
    ),
    Fault(
        "a mean for the log of rank 0",
        FABRIC,
        2,
        "    mean = fabric.all_reduce(torch.stack(losses).mean())\n",
        "    mean = torch.stack(losses).mean()\n"
        "    if fabric.is_global_zero:\n        mean = fabric.all_reduce(mean)\n",
        0,
        "mean = fabric.all_reduce(mean)",
        "take the same branch",
    ),
    Fault(
        "a NaN check raises on one rank",
        FABRIC,
        2,
        "        optimizer.step()\n",
        "        optimizer.step()\n"
        "        if fabric.global_rank == 1 and epoch == 1:\n"
        "            raise FloatingPointError('loss is NaN')\n",
        1,
        "raise FloatingPointError",
        "loss is NaN",
    ),
    Fault(
        "a head that one rank does not use",
        FABRIC,
        2,
        "        loss = cross_entropy(model(x), y)\n        fabric",
        "        net[2].weight.requires_grad\n"
        "        loss = cross_entropy(model(x), y) if fabric.global_rank == 0 else model(x).detach().sum() + net[0].bias.sum()\n        fabric",
        0,
        "fabric.backward(loss)",
        "find_unused_parameters=True",
    ),
    Fault(
        "validation of unequal length with a sum over ranks",
        FABRIC,
        2,
        "        losses = [cross_entropy(model(x), y) for x, y in held_out]\n",
        "        held_out = DataLoader(data, batch_size=8 + 8 * fabric.global_rank)\n"
        "        held_out = fabric.setup_dataloaders(held_out, use_distributed_sampler=False)\n"
        "        losses = [fabric.all_reduce(cross_entropy(model(x), y)) for x, y in held_out]\n",
        0,
        "fabric.all_reduce(",
        "run the loop at line",
    ),
    Fault(
        "a path that only rank 0 broadcasts",
        FABRIC,
        2,
        "folder = fabric.broadcast(tempfile.mkdtemp())\n",
        "folder = fabric.broadcast(tempfile.mkdtemp()) if fabric.global_rank == 0 else '.'\n",
        0,
        "fabric.broadcast(tempfile.mkdtemp())",
        "out of the branch that only rank 0 takes",
    ),
)
MMENGINE_FAULTS = (
    Fault(
        "a model that uses a layer on some batches",
        MMENGINE,
        2,
        "        found = self.head(self.body(x).relu())\n",
        "        found = self.body(x)[:, :4]\n"
        "        if x[0, 0] > 0:\n            found = self.head(self.body(x).relu())\n",
        0,
        "runner.train()",
        "find_unused_parameters=True",
    ),
    Fault(
        "a hook collects results on rank 0",
        MMENGINE,
        2,
        "runner.train()\n",
        "runner.train()\nfrom mmengine.dist import all_reduce, get_rank\n"
        "total = torch.ones(1, device='cuda')\n"
        "if get_rank() == 0:\n    all_reduce(total)\n",
        0,
        "all_reduce(total)",
        "move it out of the branch that only rank 0 takes",
    ),
    Fault(
        "a shape that differs",
        MMENGINE,
        2,
        "runner.train()\n",
        "runner.train()\nfrom mmengine.dist import all_gather, get_rank\n"
        "all_gather(torch.ones(3 + get_rank(), device='cuda'))\n",
        0,
        "all_gather(torch.ones(3",
        "same shape on all members",
    ),
    Fault(
        "the data set of one rank is shorter",
        MMENGINE,
        2,
        '        "sampler": {"type": "DefaultSampler", "shuffle": shuffle},\n',
        '        "sampler": range(12 - 4 * int(__import__("os").environ["RANK"])),\n',
        0,
        "runner.train()",
        "data loaders of unequal length",
    ),
)
PIPELINE_FAULTS = (
    Fault(
        "stages with different numbers of micro-batches",
        PIPELINE,
        2,
        "schedule = Schedule1F1B(stage, CHUNKS, loss_fn=loss_of)",
        "schedule = Schedule1F1B(stage, CHUNKS - 2 * rank, loss_fn=loss_of)",
        1,
        "nn.functional.cross_entropy(found",
    ),
    Fault(
        "the loss is reduced on the last stage",
        PIPELINE,
        2,
        "    torch.distributed.all_reduce(norm)\n",
        "    torch.distributed.all_reduce(norm)\n"
        "    if losses:\n        torch.distributed.all_reduce(torch.stack(losses).mean())\n",
        1,
        "torch.distributed.all_reduce(torch.stack(losses).mean())",
        "move line 56 out of it",
    ),
    Fault(
        "collectives in different order",
        PIPELINE,
        2,
        "    torch.distributed.all_reduce(norm)\n",
        "    if rank == 1:\n        torch.distributed.all_reduce(norm)\n"
        "    torch.distributed.broadcast(norm, 0)\n"
        "    if rank == 0:\n        torch.distributed.all_reduce(norm)\n",
        1,
        "torch.distributed.all_reduce(norm)",
        "take the same branch",
    ),
    Fault(
        "a stage sends to itself",
        PIPELINE,
        2,
        "    optimizer.step()\n",
        "    optimizer.step()\n"
        "    if rank == 0:\n        torch.distributed.send(losses or torch.ones(1, device=device), 0)\n"
        "    else:\n        torch.distributed.recv(torch.ones(1, device=device), 0)\n",
        0,
        "torch.distributed.send(",
        "skip the call if source and destination are the same rank",
    ),
    Fault(
        "a message of another size",
        PIPELINE,
        2,
        "    optimizer.step()\n",
        "    optimizer.step()\n"
        "    if rank == 0:\n        torch.distributed.send(torch.ones(8, device=device), 1)\n"
        "    else:\n        torch.distributed.recv(torch.ones(4, device=device), 0)\n",
        0,
        "torch.distributed.send(",
        "use the same shape on both ends",
    ),
)
FAULTS = (
    *DEEPSPEED_FAULTS,
    *MEGATRON_FAULTS,
    *IGNITE_FAULTS,
    *LIGHTNING_FAULTS,
    *TRAINER_FAULTS,
    *ACCELERATE_FAULTS,
    *FABRIC_FAULTS,
    *MMENGINE_FAULTS,
    *PIPELINE_FAULTS,
)
