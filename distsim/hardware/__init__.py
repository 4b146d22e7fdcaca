"""Clusters as data, and the cost of compute and communication on them.

This package knows operations only through the protocol CostedOperation and the collective
algorithms.
"""
