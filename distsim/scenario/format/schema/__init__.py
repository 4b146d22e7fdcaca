"""What is generated from the models: JSON Schema, key reference and remedies for refused values;
reads no file.
"""
