"""Data parallelism whose ranks synchronise rarely or whose membership changes: LocalSGD, DiLoCo and
quorums, as in torchft and torch's model averagers.
"""
