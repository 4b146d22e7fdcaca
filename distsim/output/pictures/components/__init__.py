"""What views are built from and that knows traces, programs and operations: the interface of a view
and its input, lane painter, call labels, selection and row assignment of the data-flow picture,
grid of groups.
"""
