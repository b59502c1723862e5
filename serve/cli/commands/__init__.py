"""The commands of `apt-jax`: one module per command, with `add_arguments(parser)` and `run(args) -> int`."""
