"""
The `speculators` backend: the library's own trainer with a vLLM server for hidden states.

The library is never imported: its commands run in an environment of their own.
"""
