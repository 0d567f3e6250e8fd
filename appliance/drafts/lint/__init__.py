"""Checks a draft against its target before vLLM loads it."""
