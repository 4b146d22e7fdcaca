"""Data about a trace that several outputs show: the selected part of a run, time spans,
activity of ranks, lanes of equal ranks, matched messages, traffic, memory over time, how a partial
run ended; no layout and no drawing.
"""
