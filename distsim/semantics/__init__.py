"""The blocking rules: a program compiled for a backend to a small instruction set, and its drivers.

Link costs and traces belong to `engine`, verdicts to `checker`.
"""
