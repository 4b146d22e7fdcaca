"""Counts FLOP and bytes of the kernels that a captured script runs and predicts their duration on a
cluster; communication cost belongs to distsim.cost.
"""
