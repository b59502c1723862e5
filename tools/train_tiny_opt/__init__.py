"""Training of the bundled model; needs the optional extra ``train`` (flax, optax, Orbax)."""
