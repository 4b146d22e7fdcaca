"""Readers of recordings: one module per format, each with a function that returns a `Recording`."""
