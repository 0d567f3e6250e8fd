"""Training of the demo pair."""
