"""
The backend `speculators`: the library's own trainer beside a vLLM server that hands out hidden states.

Nothing of the library is imported here: it runs in an environment of its own, by its commands.
"""
