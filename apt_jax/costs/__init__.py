"""Costs of steps: models of their time, fits to measured ones, descriptions of hardware; NumPy only."""
