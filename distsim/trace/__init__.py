"""A run as a table of calls, simulated or recorded: the columns, tensor values in the header,
reading and writing JSON Lines. No measurements (analysis) and no pictures (output). The package
imports nothing by itself.
"""
