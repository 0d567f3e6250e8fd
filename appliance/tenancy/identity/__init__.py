"""Who is calling: API keys, tokens of an identity provider, client certificates."""
