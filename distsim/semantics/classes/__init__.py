"""Equivalence classes of ranks found on the lowered program, and the program reduced to
representative ranks. It knows no instructions: classes of a linked program are in
local.quotient.
"""
