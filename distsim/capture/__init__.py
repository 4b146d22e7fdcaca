"""A script of torch.distributed, run under distsim's rules and clock."""
