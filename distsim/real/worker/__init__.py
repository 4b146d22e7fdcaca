"""What runs inside the process of one rank: groups, stores, tensors, compute, clocks, the program.

Starting and watching these processes belongs to launch.
"""
