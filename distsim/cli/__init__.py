"""The command line: it calls the library and prints the records it returns. Each command has a
module of its own.
"""
