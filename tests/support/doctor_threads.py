"""Facts from public issue threads about hung jobs: the evidence in the thread, its cause, a link.

Each thread is a few facts in our own words. The functions write them in the format of the tool that
printed them, with the versions and numbers of the thread. ``cause`` is the cause that the thread
confirms; empty if it confirms none. ``answer`` is what doctor must say about the evidence.
"""

from __future__ import annotations

from typing import NamedTuple

GITHUB = "https://github.com/"
_GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/"


class IssueThread(NamedTuple):
    """A thread. ``link``: below github.com. ``lines``: its evidence."""

    link: str
    lines: list[str]
    answer: str
    cause: str = ""


def timeouts(
    ranks: tuple[int, ...],
    op: str,
    number: int,
    sizes: tuple[int, int] | None = None,
    group: str = "0(default_pg)",
    counts: tuple[int, int] | None = None,
) -> list[str]:
    """Timeouts as torch 2.5 and newer print them. ``counts``: last enqueued, last completed."""
    elements = f", NumelIn={sizes[0]}, NumelOut={sizes[1]}" if sizes else ""
    enqueued, completed = counts or (number, number - 1)
    lines = []
    for rank in ranks:
        head = f"[rank{rank}]:[E1123 08:00:00.1 ProcessGroupNCCL.cpp:632] "
        lines.append(
            f"{head}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
            f"{number}, OpType={op}{elements}, Timeout(ms)=600000) ran for 600021 milliseconds"
        )
        if group:
            lines.append(
                f"{head}[PG ID 0 PG GUID {group} Rank {rank}]  failure detected by watchdog at work "
                f"sequence id: {number} PG status: last enqueued work: {enqueued}, last completed "
                f"work: {completed}"
            )
    return lines


def old_timeouts(ranks: tuple[int, ...], op: str, number: int | None) -> list[str]:
    """Timeouts as torch 1.12 to 2.1 print them, without a group."""
    numbered = f"SeqNum={number}, " if number is not None else ""
    return [
        f"[E ProcessGroupNCCL.cpp:828] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL({numbered}OpType={op}, Timeout(ms)=1800000) ran for 1804648 milliseconds"
        for rank in ranks
    ]


def signalled(rank: int, other: int, enqueued: int, completed: int) -> str:
    """A rank that dumps because another one timed out."""
    return (
        f"[rank{rank}]:[E901 05:20:03.1 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) "
        f"Rank {rank}] Received a dump signal due to a collective timeout from  rank {other} and we "
        f"will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last "
        f"completed NCCL work: {completed}."
    )


def fingerprints(one: tuple[int, str, str], other: tuple[int, str, str]) -> list[str]:
    """A mismatch found by TORCH_DISTRIBUTED_DEBUG=DETAIL: rank, operation and shape, twice."""
    texts = [
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=1, OpType={op}, "
        f"TensorShape=[{shape}], TensorDtypes=Float)"
        for rank, op, shape in (one, other)
    ]
    return [f"RuntimeError: Detected mismatch between collectives on ranks. {', but '.join(texts)}"]


def stack(rank: int, *frames: str) -> list[str]:
    """A stack of py-spy, under a head with the rank."""
    head = [f"Rank {rank}:", f'Thread {100 + rank} (idle): "MainThread"']
    return [*head, *(f"    {frame}" for frame in frames), ""]


def traceback(error: str, line: str = "train.py") -> list[str]:
    return ["Traceback (most recent call last):", f'  File "{line}", line 20, in <module>', error]


LOADER_KILLED = "RuntimeError: DataLoader worker (pid {0}) is killed by signal: Killed."
THREADS = (
    IssueThread(
        "NVIDIA-NeMo/Automodel/issues/1038",
        timeouts((1, 2, 3), "ALLGATHER", 493, (1, 4)),
        "ranks 1-3 wait in all_gather (default group, call 493); no file was given for rank 0",
        "rank 0 consolidated a checkpoint for longer than the timeout of the barrier",
    ),
    IssueThread(
        "NVIDIA/nccl/issues/296",
        [
            "init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective "
            "calls at and around rank 39."
        ],
        "rank 39 got a collective that does not match",
    ),
    IssueThread(
        "NVIDIA/nccl/issues/969",
        [
            "a:1:2 [0] net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer 10.0.0.6<58683> collective "
            "mismatch error, local size 496640 remote size 65536"
        ],
        "two ranks transfer different sizes: 496640 bytes here, 65536 bytes",
        "the author had configured the environment wrongly",
    ),
    IssueThread(
        "NVIDIA/nccl/issues/615",
        [
            "a:1:2 [0] transport/net_ib.cc:665 NCCL WARN NET/IB : collective mismatch error local size "
            "546816 remote size 524288 addr 7ff7d1530000"
        ],
        "two ranks transfer different sizes: 546816 bytes here, 524288 bytes",
    ),
    IssueThread(
        "aurekaresearch/OpenDDE/issues/23",
        fingerprints(
            (1, "_ALLGATHER_BASE", "359, 1, 1435, 16"), (2, "_ALLGATHER_BASE", "359, 1, 1436, 16")
        ),
        "rank 1 is in all_gather of [359, 1, 1435, 16]; rank 2 is in all_gather of [359, 1, 1436",
    ),
    IssueThread(
        "bghira/SimpleTuner/issues/2712",
        fingerprints((1, "ALLGATHER", "1"), (7, "REDUCE", "")),
        "rank 1 is in all_gather of [1]; rank 7 is in reduce",
    ),
    IssueThread(
        "pytorch/pytorch/issues/87995",
        [
            *stack(
                0,
                "wait (threading.py:302)",
                "get (queue.py:170)",
                "__next__ (fairseq/data/iterators.py:648)",
                "train (fairseq_cli/train.py:274)",
            ),
            *stack(
                1,
                "all_reduce (torch/distributed/distributed_c10d.py:1200)",
                "train (fairseq_cli/train.py:280)",
            ),
            *stack(
                2,
                "all_reduce (torch/distributed/distributed_c10d.py:1200)",
                "train (fairseq_cli/train.py:280)",
            ),
        ],
        "ranks 1 and 2 are in all_reduce, rank 0 is not",
        "rank 0 hung in its data loader, but not with num_workers=0",
    ),
    IssueThread(
        "deepspeedai/DeepSpeed/issues/5539",
        timeouts((15,), "_ALLGATHER_BASE", 96383, (88200, 5644800)),
        "no file was given for ranks 0-14 and 16-63",
    ),
    IssueThread(
        "VLR-CVC/vlm-training/issues/26",
        timeouts((9,), "_ALLGATHER_BASE", 190346, (19447808, 311164928)),
        "rank 9 waits in all_gather (default group, call 190346); no file was given for ranks 0-8",
    ),
    IssueThread(
        "pytorch/pytorch/issues/143536",
        [
            *timeouts((1,), "_ALLGATHER_BASE", 2109, (262711296, 525422592), group=""),
            *timeouts((0,), "_ALLGATHER_BASE", 2109, (40960, 81920), group=""),
        ],
        "rank 0 has 40,960 elements; rank 1 has 262,711,296 elements",
    ),
    IssueThread(
        "huggingface/accelerate/issues/2375",
        timeouts((1, 3, 4, 5, 6, 7), "ALLREDUCE", 167, (1, 1), group=""),
        "ranks 1 and 3-7 wait in all_reduce",
    ),
    IssueThread(
        "huggingface/accelerate/issues/2000",
        old_timeouts((2,), "ALLGATHER", 18364),
        "rank 2 waits in all_gather (unknown group, call 18364)",
        "save_state was called on the main process only",
    ),
    IssueThread(
        "hiyouga/LlamaFactory/issues/7396",
        timeouts((0, 4), "ALLREDUCE", 1580, (466119168, 466119168), "1", (1582, 1579)),
        "ranks 0 and 4 wait in all_reduce",
    ),
    IssueThread(
        "hiyouga/LlamaFactory/issues/6269",
        timeouts((6,), "_REDUCE_SCATTER_BASE", 7753, (544997376, 68124672)),
        "no file was given for ranks 0-5 and 7",
    ),
    IssueThread(
        "ai2cm/ace/issues/348",
        old_timeouts((1, 2, 3), "ALLREDUCE", 1132079),
        "ranks 1-3 wait in all_reduce",
    ),
    IssueThread(
        "Sense-X/UniFormer/issues/33",
        old_timeouts((1,), "BROADCAST", None),
        "rank 1 waits in broadcast",
    ),
    IssueThread(
        "axolotl-ai-cloud/axolotl/issues/494",
        old_timeouts((1,), "BROADCAST", 42),
        "rank 1 waits in broadcast (unknown group, call 42)",
    ),
    IssueThread(
        "vllm-project/vllm/issues/3071",
        old_timeouts((3,), "ALLREDUCE", 4967570),
        "rank 3 waits in all_reduce (unknown group, call 4967570)",
    ),
    IssueThread(
        "vllm-project/vllm/issues/5484",
        [
            f"(RayWorkerWrapper pid=4009) {line}"
            for line in timeouts((1,), "GATHER", 158046, (2867200, 0))
        ],
        "rank 1 waits in gather (default group, call 158046)",
    ),
    IssueThread(
        "sgl-project/sglang/issues/1693",
        timeouts((5,), "_ALLGATHER_BASE", 9141, (19008, 152064)),
        "no file was given for ranks 0-4, 6 and 7",
    ),
    IssueThread(
        "XPixelGroup/BasicSR/issues/737",
        timeouts((0, 1, 2), "ALLREDUCE", 808, (9801523, 9801523), counts=(811, 807)),
        "ranks 0-2 wait in all_reduce (default group, call 808)",
    ),
    IssueThread(
        "snowflakedb/ArcticTraining/issues/219",
        [
            *timeouts((2,), "_ALLGATHER_BASE", 120049, (16384000, 131072000)),
            "[rank7]:[E626 05:14:36.3 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 7]"
            " ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress",
        ],
        "torch's heartbeat monitor reports: rank 7 made no progress for 480 s",
    ),
    IssueThread(
        "OpenRLHF/OpenRLHF/issues/1126",
        [signalled(2, 6, 460631, 460630), *timeouts((7,), "ALLREDUCE", 460631, (1, 1))],
        "rank 7 waits in all_reduce (default group, call 460631)",
    ),
    IssueThread(
        "KaiqiangXiong/CL-MVSNet/issues/14",
        timeouts((0,), "ALLREDUCE", 716, None, counts=(747, 715)),
        "rank 0 waits in all_reduce (default group, call 716)",
    ),
    IssueThread(
        "PrimeIntellect-ai/prime-rl/pull/3186",
        [
            signalled(0, 13, 1261, 1259),
            *timeouts((13,), "ALLTOALL_BASE", 77, (64, 64), group="9(mesh_ep)"),
        ],
        "wait",
    ),
    IssueThread(
        "vipshop/cache-dit/pull/761",
        timeouts((0, 2), "ALLTOALL_BASE", 472025, (407003136, 407003136), "5(mesh_ulysses)"),
        "ranks 0 and 2 wait in all_to_all",
    ),
    IssueThread(
        "OpenRLHF/OpenRLHF/issues/1040",
        [
            "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 "
            "clients joined."
        ],
        "only 1 of 3 processes joined in 1801 s",
    ),
    IssueThread(
        "vllm-project/vllm/issues/19670",
        [
            "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while "
            "trying to connect to (172.17.0.9, 46229)."
        ],
        "a process could not reach the store at 172.17.0.9:46229",
    ),
    IssueThread(
        "OpenRLHF/OpenRLHF/issues/970",
        [
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
            *(
                f"(ActorModelRayActor pid=744, ip=10.1.59.27) {line}"
                for line in timeouts((9,), "BROADCAST", 876319, (8, 8), "2")
            ),
        ],
        "an actor's process died",
        "the OOM killer ended a worker of Ray: the host memory was full",
    ),
    IssueThread(
        "nextflow-io/nextflow/issues/5932",
        [
            "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks "
            "have been OOM Killed.",
            "srun: error: sdumont6156: task 0: Out Of Memory",
        ],
        "task 0 on sdumont6156 was killed for lack of memory",
    ),
    IssueThread(
        "ZettaAI/zetta_utils/issues/671",
        [
            "slurmstepd: error: *** JOB 494583 ON n CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT "
            "***"
        ],
        "the job was cancelled (time limit)",
        "the time limit of the job",
    ),
    IssueThread(
        "facebookincubator/submitit/issues/1708",
        [
            "slurmstepd: error: *** JOB 608 ON n CANCELLED AT 2022-08-12T02:06:12 DUE TO JOB REQUEUE "
            "***",
            "srun: error: n: tasks 2-3: Exited with exit code 1",
        ],
        "the job was cancelled (job requeue)",
        "the scheduler preempted the job",
    ),
    IssueThread(
        "IGNF/myria3d/issues/123",
        ["slurmstepd: error: *** STEP 6053.0 ON D CANCELLED AT 2024-04-23T12:18:08 ***"],
        "the job was cancelled",
        "one rank prepared data for longer than the timeout, which NCCL_BLOCKING_WAIT enforced",
    ),
    IssueThread(
        "determined-ai/determined/issues/8915",
        [
            "WARNING: torch.distributed.elastic.agent.server.api:Received 15 death signal, shutting "
            "down workers"
        ],
        "it received signal 15: the job was ended from outside",
    ),
    IssueThread(
        "Megvii-BaseDetection/YOLOX/issues/702",
        [f"{_GLOO}pair.cc:575] Connection closed by peer [127.0.1.1]:39827"],
        "gave up waiting for another rank",
    ),
    IssueThread(
        "QwenAudio/CosyVoice/issues/297",
        traceback(f"{_GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
        "gave up waiting for another rank",
        "the data set gave the ranks a different number of samples",
    ),
    IssueThread(
        "pytorch/pytorch/issues/75512",
        traceback(f"{_GLOO}pair.cc:598] Connection closed by peer [18.25.6.30]:28048", "recv.py"),
        "gave up waiting for another rank",
        "rank 0 exited without waiting for its isend",
    ),
    IssueThread(
        "pytorch/pytorch/issues/72034",
        traceback(LOADER_KILLED.format(29001)),
        "a process of unknown rank failed: RuntimeError: DataLoader worker (pid 29001)",
    ),
    IssueThread(
        "alibaba/Pai-Megatron-Patch/issues/583",
        [f"[rank0]: {line}" for line in traceback(LOADER_KILLED.format(9382))],
        "rank 0 raised RuntimeError: DataLoader worker (pid 9382) is killed",
    ),
    IssueThread(
        "rwth-i6/returnn/issues/1454",
        [
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2023-11-05_06:21:10",
            "  rank      : 1 (local_rank: 1)",
            "  exitcode  : 1 (pid: 11642)",
            "  traceback : To enable traceback see: errors.html",
        ],
        "rank 1 ended first, with exit status 1",
    ),
    IssueThread(
        "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/pull/132",
        [
            "Not all ranks joining collective, sequence number: 288686",
            "group info: 0:default_pg",
            "collective: nccl:_all_gather_base",
            "missing ranks: {0}",
        ],
        "rank 0 did not join all_gather (call 288686 of group 0:default_pg)",
        "rank 0 stalled in a kernel before the call",
    ),
    IssueThread(
        "NVIDIA/nccl/issues/1193",
        old_timeouts((21, 27, 43, 108), "ALLREDUCE", 5020),
        "ranks 21, 27, 43 and 108 wait in all_reduce",
    ),
    IssueThread(
        "vllm-project/vllm-omni/issues/2928",
        [
            "No available shared memory broadcast block found in 60 seconds.",
            signalled(1, 1, 233659, 233659),
            signalled(0, 1, 233659, 233659),
        ],
        "no worker took a message for 60 s",
    ),
    IssueThread(
        "pytorch/pytorch/issues/135703",
        [
            line
            for rank in (0, 1)
            for line in stack(
                rank,
                "backward (torch/autograd/__init__.py:266)",
                "backward (torch/_tensor.py:522)",
                "backward (deepspeed/runtime/zero/stage3.py:2213)",
                "train (fine_tune.py:40)",
            )
        ],
        "ranks 0 and 1 are in backward",
    ),
    IssueThread(
        "mila-iqia/milabench/pull/269",
        timeouts((11, 12, 14, 15), "REDUCE", 2070, (1, 1)),
        "ranks 11, 12, 14 and 15 wait in reduce (default group, call 2070)",
    ),
    IssueThread(
        "ShinoharaHare/LLM-Training/issues/7",
        [
            line.replace("PG ID 0 PG GUID 0(default_pg)", "PG 0")
            for line in timeouts((2, 4), "ALLREDUCE", 7487, (1, 1))
        ],
        "ranks 2 and 4 wait in all_reduce",
    ),
    IssueThread(
        "om-ai-lab/VLM-R1/issues/294",
        timeouts((4,), "ALLREDUCE", 3106, (16666624, 16666624), "1"),
        "rank 4 waits in all_reduce",
    ),
    IssueThread(
        "Lightning-AI/pytorch-lightning/issues/20434",
        timeouts((2, 3), "BROADCAST", 1, (1, 1)),
        "ranks 2 and 3 wait in broadcast (default group, call 1)",
    ),
    IssueThread(
        "huggingface/diffusers/issues/12422",
        timeouts((1, 5, 7), "ALLREDUCE", 2521, (160672064, 160672064), group=""),
        "ranks 1, 5 and 7 wait in all_reduce",
    ),
)
