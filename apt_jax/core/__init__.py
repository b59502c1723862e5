"""Types shared by all parts of the engine. Depends on NumPy only."""
