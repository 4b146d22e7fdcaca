"""One question about one scenario, answered by combining program, engine, check and analysis:
simulate, check, expectations, training metrics, what-if. Several scenarios belong in planning.
"""
