"""Traces of requests for a collector in the enclave: times and counts, never content."""
