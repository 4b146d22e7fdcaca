"""What hub and ranks share: frames, shared memory, value types of messages, blocked threads.

No matching of calls and no torch.
"""
