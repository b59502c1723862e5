"""Transfers: cached blocks and per-request states between the device, host memory and disk."""
