"""DS604 to DS608: what passes today and bites on another back end, or once something goes wrong. None of them changes a verdict."""

from __future__ import annotations

from distsim.findings.info import CodeInfo, scenario, two_ranks

HABITS: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS604",
        "fine on one back end, not on another",
        "warning",
        None,
        "Under the file's own back end the program gets through; under another one it hangs, raises, crashes or is left undefined.",
        "It runs on a laptop with gloo and stands still on the cluster with nccl, or the other way round.",
        "If the other back end is meant as well, look at it: `distsim check FILE --backend nccl`. Messages in batches and"
        " one order of groups on all ranks work everywhere. Else ignore this.",
        scenario(
            2,
            "groups: {a: [0, 1], b: [0, 1]}\n",
            "{all_reduce: {tensor: x, group: a, async: true, as: h}, ranks: 0}",
            "all_reduce: {tensor: z, group: b, async: true, as: k}",
            "{all_reduce: {tensor: x, group: a, async: true, as: h}, ranks: 1}",
            "wait: all",
        ),
    ),
    CodeInfo(
        "DS606",
        "group without the world's timeout",
        "warning",
        None,
        "The file sets a timeout for the world, and a group is made without one. `new_group` does not inherit it.",
        "The group takes the back end's default, 30 minutes (nccl 10): when a member stays away, the job looks frozen although the"
        " world would have given up long before.",
        "Say the timeout again where the group is made: `new_group: {…, timeout: 60 s}` or `groups: {g: {ranks: […], timeout: 60 s}}`.",
        scenario(2, "options: {timeout: 60 s}\ngroups: {pair: [0, 1]}\n", "all_reduce: {tensor: x, group: pair}"),
    ),
    CodeInfo(
        "DS607",
        "handle of a message not kept",
        "warning",
        None,
        "The request that isend, irecv or a batch returns is dropped, or its name is bound again, before it was waited for.",
        "Gloo cancels a message whose request is gone unless its counterpart already waits for it; torch's MPI ends the process. NCCL"
        " goes on. So it works or not by who comes first.",
        "Keep the request (`as: h`) and wait for it; in a loop give each round its own (`as: h@i`).",
        two_ranks("{isend: {tensor: x, dst: 1}, ranks: 0}", "{recv: {tensor: x, src: 0}, ranks: 1}"),
    ),
    CodeInfo(
        "DS608",
        "collective that not all members can reach",
        "note",
        None,
        "A collective stands under a selector that leaves out members of its group, and they make fewer calls of its kind.",
        "A collective waits for every member. A call that differs only in place is fine: this is said where one is missing.",
        "Move it out of the selector, or make a group of those who take part.",
        two_ranks("{all_reduce: {tensor: x}, ranks: 0}", "barrier"),
    ),
)
