"""Machine-readable output: the JSON of a simulation, its JSON Schemas, SARIF and GitHub
annotations, Chrome trace events; keys are interfaces and keep their meaning.
"""
