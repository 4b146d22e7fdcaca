"""The operation table: one module per family of torch.distributed operations (adding one means
adding a file here) and the registry that collects them; no clock, no backend behaviour, no cost.
"""
