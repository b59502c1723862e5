"""Servers, command line and clients of apt-jax."""
