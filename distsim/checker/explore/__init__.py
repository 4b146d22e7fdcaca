"""Explicit-state search over all event orders of programs with any-source receives (partial-order
reduction by persistent sets, symmetry); returns reading results and schedules, never findings.
"""
