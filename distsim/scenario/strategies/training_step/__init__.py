"""Whole training steps on a mesh that combine several kinds of parallelism (`transformer:`,
`hybrid:`), with transformer sizes, presets, FLOPs, traffic and memory, which planning uses too.
"""
