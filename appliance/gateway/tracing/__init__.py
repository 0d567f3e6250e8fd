"""Traces of requests, for a collector inside: which part took how long, never what was said."""
