"""Comparison of drafting methods on a site's own prompts."""
