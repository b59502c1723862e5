"""Logs, metrics, traces and profiles of a server."""
