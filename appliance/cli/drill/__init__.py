"""A drill: a real collapse of acceptance, caused on purpose, and what became of it."""
