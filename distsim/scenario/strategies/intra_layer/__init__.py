"""Parallelism inside one layer: tensor, context (ring attention), Ulysses and expert parallelism.

Each strategy gives the entries of a layer's forward and backward pass. A pipeline or a hybrid step
can use them as a stage's compute.
"""
