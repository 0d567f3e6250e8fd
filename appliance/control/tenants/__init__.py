"""Changes of tenants and keys: the one way to make them, what the log says of them, whom a start lets in."""
