"""Ops for fast quantised execution, one file each, registered under ``torch.ops.quantpolicy``."""
