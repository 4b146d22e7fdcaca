"""Why a recorded job is slow: which rank, stage or phase costs how much of a step.

The analysis takes a `distsim.trace.recordings.recording.Recording` and returns a `SlowJob`.
It reads no files and prints nothing.
"""
