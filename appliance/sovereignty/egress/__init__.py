"""The egress check: attempts to connect outside, and judges the outcomes."""
