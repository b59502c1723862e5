"""The vocabulary of the engine's parts, under all of them: NumPy only."""
