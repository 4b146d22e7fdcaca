"""How ranks are started and ended: command lines, preloading, forking, signals, cleaning up.

The main function of a rank's process is here too, because it installs the patches.
"""
