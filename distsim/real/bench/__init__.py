"""Measures messages and collectives on this machine with Gloo (`distsim bench`).

Fitting a hardware model to the times belongs to calibrate.
"""
