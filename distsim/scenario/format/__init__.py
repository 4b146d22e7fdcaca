"""The YAML format of scenario files, from text to the fields of a Scenario and back (dump); layers
from bottom to top: models, schema, source, reading. It derives nothing from a scenario.
"""
