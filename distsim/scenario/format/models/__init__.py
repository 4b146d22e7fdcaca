"""What a file may contain: Pydantic models of its sections, entries of a program, field parsers and
help texts; no YAML, no positions, no checks across sections.
"""
