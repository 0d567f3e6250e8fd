"""The built-in trainer: an EAGLE head trained by one process."""
