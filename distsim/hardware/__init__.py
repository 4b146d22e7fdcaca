"""Clusters as data, and the cost of compute and communication on them.

This package knows operations only through the protocol PricedOperation and the collective
algorithms.
"""
