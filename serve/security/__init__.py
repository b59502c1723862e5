"""API key authentication and TLS."""
