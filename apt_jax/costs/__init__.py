"""Step costs: models of step time, their fits to measured steps, and hardware descriptions; independent of JAX."""
