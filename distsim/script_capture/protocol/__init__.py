"""What hub and ranks share: frames, shared memory, value types of messages, and how /proc shows
that a process is blocked; no matching and no torch.
"""
