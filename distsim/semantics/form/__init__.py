"""The instructions that every driver runs (post, wait, rendezvous, exit), the compilers that
produce them, and the linked columns: which calls match, what each needs before it completes, which
match and differ. Nothing here advances a clock or a state.
"""
