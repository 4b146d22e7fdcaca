"""The records of evidence by rank and group, names of operations and common phrases; no file format
and no conclusion is known here.
"""
