"""Measurements on finished traces and recordings: time per rank and collective, critical path,
comparison of two runs, and why a recorded job is slow. Nothing here runs a simulation.
"""
