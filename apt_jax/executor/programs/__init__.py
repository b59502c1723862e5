"""Programs of a step: their inputs packed on the host, the jitted functions, and the calls that run them."""
