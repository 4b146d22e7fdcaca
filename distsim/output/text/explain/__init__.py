"""The pages of `distsim explain`: operations, strategies, backends, keys of the scenario format,
and the terms of a predicted cost.
"""
