"""Drawing primitives that know no scenario, program or trace (time spans at most): box diagrams,
sequence diagrams, SVG, time charts, tracks, colours, and the writers for DOT, Mermaid and SVG.
"""
