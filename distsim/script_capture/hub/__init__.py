"""The process that receives every rank's calls, matches them, answers waits and advances time when
no rank can run; knows nothing of torch's Python API and never patches anything.
"""
