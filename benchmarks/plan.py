"""CPU time of a plan: 500 layouts of a 70B model on 512 GPUs, checked and timed on one core.

python benchmarks/plan.py [LAYOUTS]
"""

from __future__ import annotations

import argparse
import time

from distsim.hardware.cluster import preset
from distsim.planning.evaluate_layouts import evaluate_chunk, layout_chunks
from distsim.planning.layout_result import LayoutResult
from distsim.planning.layouts import ParallelLayout, PlanRequest, candidate_layouts


def main(wanted: int) -> None:
    asked = PlanRequest("llama3-70b", 512, 1024, preset("dgx-h100"))
    start = time.process_time()
    every = list(candidate_layouts(asked))
    good = [one for one in every if isinstance(one, ParallelLayout)]
    print(
        f"{len(every)} layouts, {len(good)} of them valid: {time.process_time() - start:.1f} s of CPU"
    )
    step = max(len(good) // wanted, 1)
    chosen = good[::step][:wanted]
    start = time.process_time()
    found = [one for chunk in layout_chunks(asked, chosen) for one in evaluate_chunk(chunk)]
    took = time.process_time() - start
    fit = [one for one in found if isinstance(one, LayoutResult)]
    print(
        f"{len(found)} checked, {len(fit)} of them fit into memory and were timed, in {took:.1f} s of CPU: {took / len(found):.3f} s per layout"
    )
    print(f"  {took / max(len(fit), 1):.3f} s per layout that fits")
    best = min(fit, key=lambda one: one.step_ns)
    print(f"fastest: {best.layout.label()}, {best.step_ns / 1e9:.3f} s, MFU {best.mfu:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layouts", type=int, nargs="?", default=500, help="[default: 500]")
    main(parser.parse_args().layouts)
