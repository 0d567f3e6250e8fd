"""Somebody else who keeps the log's newest head: theirs and our side of it."""
