"""Scenarios that fail, reduced (`shrink`) and made right (`fixes`)."""
