"""HTTP in, HTTP out; no business rules."""
