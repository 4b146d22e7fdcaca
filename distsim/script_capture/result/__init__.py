"""From recorded calls to a Program, and from its simulation to the result of a capture; nothing
here runs while ranks run.
"""
