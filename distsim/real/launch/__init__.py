"""Starts, watches and ends the rank processes of a machine.

Also coordinates the launchers of several machines, and plans the command lines of torchrun, srun
and mpirun. Reading what the ranks left belongs to results.
"""
