"""From recorded calls to a `Program`, and from its simulation to the result of a capture.

Nothing here runs while the ranks run.
"""
