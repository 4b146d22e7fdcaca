"""From a view name and a run (or an operation) to svg, png, pdf, dot or mermaid: the renderer, and
the pictures of other commands (two runs overlaid, a sweep); the top layer over views, components
and drawing.
"""
