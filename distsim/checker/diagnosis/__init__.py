"""From the end of a run to findings: the wait-for graph of a hang, the awaited calls, the causes
with evidence and advice, and the findings for mismatches, leftovers and dependence on event order.
Decides no verdict.
"""
