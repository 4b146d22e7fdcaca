"""The process that receives every rank's calls, matches them and answers waits.

When no rank can run, it decides what only time would bring about. It knows nothing of torch's
Python API and never patches anything.
"""
