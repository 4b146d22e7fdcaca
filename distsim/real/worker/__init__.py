"""What runs inside the process of one rank: process groups, stores, tensors, compute, clocks and
the program itself; starting and watching processes belongs to launch.
"""
