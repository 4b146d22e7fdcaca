"""PyTorch's fully_shard (FSDP2, ZeRO 1 to 3, HSDP).

The package has its fields, the events that its hooks cause, and the calls made of these events.
"""
