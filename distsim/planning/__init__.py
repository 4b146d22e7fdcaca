"""Which layout of a training step is fastest, and which fit: every one on so many GPUs, timed,
compared.
"""
