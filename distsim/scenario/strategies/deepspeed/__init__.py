"""DeepSpeed's ZeRO 1, 2 and 3 and ZeRO++.

The package has the fields, the gradient buckets, the parameter coordinator of stage 3, and the
calls of each stage. DeepSpeed-Ulysses is in `distsim.scenario.strategies.intra_layer.ulysses`.
"""
