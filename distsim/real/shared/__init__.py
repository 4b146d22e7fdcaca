"""What launchers and rank processes both use: the job description, the progress file, devices, the
rendezvous; nothing here imports the other subpackages of real.
"""
