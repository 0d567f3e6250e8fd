"""Measurements, each one command; results under benchmarks/results."""
