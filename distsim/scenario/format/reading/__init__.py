"""Positioned data to checked Scenario fields: entries, names, strategies expanded, validation
errors with their positions; evaluates nothing per rank (that is lowering, in distsim.program).
"""
