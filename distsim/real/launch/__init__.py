"""Starts the rank processes of a machine, watches and ends them, agrees with launchers on other
machines, and plans torchrun, srun and mpirun command lines; reading what the ranks left belongs to
results.
"""
