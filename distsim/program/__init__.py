"""A scenario lowered to the calls of all ranks (Program), and programs built from plain calls; no
blocking rules (semantics) and no times (engine).
"""
