"""From the files that ranks left to a trace, findings and the comparison with the simulation.

Nothing here starts or ends a process.
"""
