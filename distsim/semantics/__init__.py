"""The blocking rules: a program compiled for a backend to a small instruction set, and its drivers.

The costs of calls come from `hardware.cost`; local clocks turn them into times. Sharing of links
among transfers, times of other programs, and traces belong to `engine`, verdicts to `checker`.
"""
