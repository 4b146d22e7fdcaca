"""Replacements of names in torch, multiprocessing and subprocess that a rank installs before the
script is loaded, each with its reason; emulating a GPU is capture.cuda.
"""
