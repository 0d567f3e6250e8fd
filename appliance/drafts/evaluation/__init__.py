"""Measures whether a new draft is at least as good as the one in service, before it serves any request."""
