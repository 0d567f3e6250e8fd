"""Disposal of entries after their retention: the decision, and its execution in the database."""
