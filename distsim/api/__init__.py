"""The public Python interface: one function for each question, and a result object for each answer.

`distsim.simulate`, `distsim.check` and the other names of ``distsim.__all__`` are defined here. The
functions only combine the packages below; a rule, a cost or a table layout does not belong here.
"""
