"""The egress check: tries to get out, and says what followed from the attempt."""
