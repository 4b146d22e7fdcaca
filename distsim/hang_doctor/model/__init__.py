"""The evidence: records by rank and group, names of operations, and common phrases.

No file format and no conclusion is known here.
"""
