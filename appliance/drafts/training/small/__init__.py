"""The built-in trainer: trains an EAGLE head in one process."""
