"""Recordings of distributed jobs as one event graph, and a reader for each format.

`event_graph` replays a recording exactly and answers what-if questions on it. `readers` turns files
of profilers and of distsim into that graph. Conclusions belong to `distsim.analysis.slow_jobs`.
"""
