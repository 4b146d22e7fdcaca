"""What launchers and rank processes both use: job description, progress file, devices, rendezvous.

Nothing here imports the other subpackages of real.
"""
