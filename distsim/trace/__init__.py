"""A run as a table of calls, simulated or recorded: columns, tensor values, files in JSON Lines.

`recordings` reads the profiles of other tools as one event graph. Measurements on traces belong to
analysis, pictures to output. The package imports nothing by itself.
"""
