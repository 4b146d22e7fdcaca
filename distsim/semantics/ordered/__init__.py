"""The same rules as an explicit state that moves in steps, for drivers to which the order of events
matters (event-driven engine, order search, checkers). It has no clock: the driver chooses the next
step.
"""
