"""Pages of docs/reference made from the models: the scenario file and the operations.

`distsim.cli.generate_docs` writes them. Nothing here is loaded by a command.
"""
