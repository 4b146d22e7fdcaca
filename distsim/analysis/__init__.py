"""Measurements on one or two finished traces: time per rank and collective, critical path,
comparison of two runs. Nothing here runs a simulation.
"""
