"""What several commands share: argument types, input and output files, console, progress, exit
status, report writing. Imports no command.
"""
