"""Everything that knows about vLLM: starting it, watching it, talking to it."""
