"""YAML text to plain data with positions, syntax errors, --set overrides, and the collector of
problems; the only place that imports yaml, and knows no key's meaning except for overrides and
hints.
"""
