"""One module per command, named after it, each with a function `command`. A command never imports
another command.
"""
