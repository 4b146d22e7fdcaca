"""torch's own tests of torch.distributed (`torch.testing._internal.distributed.distributed_test`)
under capture, with 4 ranks and the backend gloo.

    python benchmarks/torch_suite.py [pattern]

Each test runs on four forked ranks. The output has a line for each test that fails, and the numbers
of tests that pass, that torch skips, and that fail.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
import unittest
from collections import Counter
from datetime import timedelta

RANKS = 4
FOLDER = tempfile.mkdtemp(prefix="torch-suite-")
os.environ |= {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(RANKS),
    "TEMP_DIR": FOLDER,
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29533",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

from distsim.script_capture.launch.capture_target import CaptureTarget  # noqa: E402
from distsim.script_capture.launch.parent_process import CapturedRun, CaptureRunOptions, run_capture  # noqa: E402

SKIPS = {skip.exit_code for skip in TEST_SKIPS.values()}


class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc,valid-type]
    """The tests; the benchmark starts their processes."""

    def _spawn_processes(self) -> None:
        """Nothing: the ranks are there."""


def fresh_folder() -> None:
    """What a test finds in TEMP_DIR."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(FOLDER, name))
    suite.Barrier.barrier_id = 0


def one(name: str) -> str:
    """passed, skipped, or why not."""
    fresh_folder()

    def work() -> None:
        case = Suite(name)
        case.rank, case.file_name = int(os.environ["RANK"]), os.path.join(FOLDER, "file")
        seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
        dist.init_process_group(
            init_method="env://",
            backend="gloo",
            world_size=RANKS,
            rank=case.rank,
            timeout=timedelta(seconds=seconds),
        )
        case._barrier()
        getattr(case, name)()
        case._barrier()
        dist.destroy_process_group()

    target = CaptureTarget(name, function=work, home=suite.__file__)
    return outcome(
        run_capture(
            CaptureRunOptions(target, RANKS, backend="gloo", timeout_s=60, keep_output=True)
        )
    )


def outcome(captured: CapturedRun) -> str:
    members = [*captured.ranks.values(), *captured.others]
    ends = [m.ended for m in members]
    if captured.ended != "ended":
        return captured.ended
    if any(e is not None and e.code in SKIPS for e in ends):
        return "skipped"
    failed = next((e for e in ends if e is None or e.how != "ended"), None)
    if failed is None:
        return "passed" if all(e is not None for e in ends) else "no end"
    return "skipped" if "SkipTest" in failed.text else f"{failed.how}: {failed.text[:110]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", nargs="?", default="", help="Run tests whose names match.")
    parser.add_argument("-v", "--verbose", action="store_true", help="Print a line for each test.")
    options = parser.parse_args()
    pattern = re.compile(options.pattern)
    names = [n for n in unittest.TestLoader().getTestCaseNames(Suite) if pattern.search(n)]
    told: Counter[str] = Counter()
    began = time.perf_counter()
    for name in names:
        if getattr(getattr(Suite, name), "__unittest_skip__", False):
            told["skipped"] += 1
            continue
        found = one(name)
        told[found if found in ("passed", "skipped") else "failed"] += 1
        if found not in ("passed", "skipped"):
            print(f"{name}: {found}", flush=True)
        if options.verbose:
            print(name, found, flush=True)
    print(dict(told), f"{time.perf_counter() - began:.0f} s of {len(names)} tests")
    shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
