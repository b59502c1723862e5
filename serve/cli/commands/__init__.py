"""The commands of `apt-jax`, a module each: `add_arguments(parser)` and `run(args) -> int`."""
