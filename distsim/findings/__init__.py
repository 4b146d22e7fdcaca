"""What a check or a run can report: findings, the closed table of codes with a page for each, and
the final state of a run (which ranks ended, which are blocked); detects nothing itself.
"""
