"""Helpers that know nothing of ranks, calls or traces: errors, message text, fast records, arrays,
units, expressions, file input and output, field parsing.
"""
