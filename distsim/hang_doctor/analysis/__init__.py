"""From evidence to causes: which ranks wait for which, where they diverge, and what is proved.

Nothing here reads a file.
"""
