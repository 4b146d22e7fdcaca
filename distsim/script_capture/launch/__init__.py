"""Command lines, preloading, forking, signals and cleaning up: how ranks are started and ended;
also the main function of a rank's process.
"""
