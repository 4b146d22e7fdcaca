"""Scenarios that fail, made small (`shrink`) and made right (`fixes`)."""
