"""How the demo pair is trained."""
