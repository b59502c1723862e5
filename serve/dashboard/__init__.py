"""The dashboard: its static page and the stream of snapshots that feeds it."""
