"""Which calls meet, as numbers and lookups (channels, sequences, k-th call), and how calls that
meet differ; no findings and no wording.
"""
