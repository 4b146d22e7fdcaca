"""Clusters as data and what compute and communication cost on them; knows operations only by the
protocol PricedOperation and the collective algorithms.
"""
