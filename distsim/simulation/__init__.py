"""One question about one scenario or trace, answered by combining program, engine, checker and
analysis: simulate, check, expectations, training metrics, what-if; `trace_replay` simulates the
calls of a trace again. Several scenarios belong in planning.
"""
