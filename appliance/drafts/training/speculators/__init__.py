"""The `speculators` backend; the library is never imported: its commands run in their own environment."""
