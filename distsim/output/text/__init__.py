"""Reports of the commands, one module per command: each builds a `Report` from a finished result.

No results are computed here, no widths are chosen, and nothing is drawn.
"""
