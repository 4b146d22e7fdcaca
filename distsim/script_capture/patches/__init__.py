"""Replacements of names in torch, multiprocessing and subprocess, each with its reason.

A rank installs them before the script is loaded. Emulating a GPU is not done here but in
`distsim.script_capture.cuda`.
"""
