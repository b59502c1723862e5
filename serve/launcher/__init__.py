"""Replicas and their gateway: `plan` decides what runs, `supervisor` keeps it running."""
