"""Transfers of cached blocks, and of single slots of blocks, between the device, host memory and disk."""
