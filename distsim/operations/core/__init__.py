"""What definitions of operations are made of: the base classes, resolved calls, field types with
their schemas and help, and collective algorithms as data; knows no single operation and imports
nothing from distsim.operations itself.
"""
