"""Everything that distsim prints, writes or draws for people and tools from finished results
(simulations, checks, diagnoses, plans, real runs); it computes no result of its own and only
cli/ and testing import it. Layers, lowest first: text_layout, trace_data, json and pictures,
text, page.
"""
