"""Readers of evidence: one module per file format, and the code that lists and recognises files.

Readers fill an ``Evidence`` and draw no conclusions.
"""
