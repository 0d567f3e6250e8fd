"""Witnesses, which keep the log's newest head: their side and ours."""
