"""Reports of the commands as plain text for the terminal, one module per command; no results are
computed here and nothing is drawn.
"""
