"""What blocks, and until when: a program compiled under a backend to one small form, and the two
ways to run it (no prices of links, no trace, no verdicts: those are in engine and check).
"""
