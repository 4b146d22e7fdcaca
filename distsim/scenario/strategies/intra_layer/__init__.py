"""Parallelism inside one layer: tensor, context (ring attention), Ulysses and expert parallelism;
each gives the entries of a layer's forward and backward pass, which a pipeline or hybrid step can
use as a stage's compute.
"""
