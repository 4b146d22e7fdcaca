"""Emulate GPUs in CPU memory, for scripts that ask for CUDA.

With or without a compiled extension, and with Triton's interpreter for its kernels. Communication
is not handled here.
"""
