"""Many simulations: points of a grid, run on all cores or on a cluster, kept as they come, taken up
again where they stopped.
"""
