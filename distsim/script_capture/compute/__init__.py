"""Count FLOP and bytes of the kernels that a captured script runs, and predict their duration.

The cost of communication belongs to `distsim.hardware.cost`.
"""
