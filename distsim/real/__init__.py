"""The same scenario for real: launching, running and recording it on torch.distributed."""
