"""HTTP connections: the server, its protocol limits and TLS."""
