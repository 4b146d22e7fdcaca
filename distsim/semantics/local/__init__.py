"""Driver for programs in which no order of events decides anything: each rank runs ahead on its own
clock, or one representative per class of equal ranks; and which ranks are blocked afterwards.
"""
