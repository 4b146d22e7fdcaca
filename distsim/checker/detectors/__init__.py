"""Detectors that need only the text of a program (and which positions were reached), not how a run
ended: races, leaks, swapped calls, backend support, lint, peak memory. No wait-for analysis.
"""
