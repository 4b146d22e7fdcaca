"""Measures messages and collectives on this machine with Gloo (`distsim bench`); fitting a hardware
model to the times belongs to calibrate.
"""
