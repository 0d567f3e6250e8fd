"""
What a worker runs: vLLM's OpenAI server, imported without garbage collection.

Each process of a worker begins here, the engine's too.  It imports 5,000 modules and keeps all they make, so
to look for garbage meanwhile only takes time.
"""

import gc
import runpy

gc.disable()
import vllm.v1.engine.core  # noqa: E402, F401

gc.freeze()
gc.enable()

MODULE = "vllm.entrypoints.openai.api_server"
"""Runs in both builds of vLLM; the `vllm` command does not start in the CPU build."""

if __name__ == "__main__":
    runpy.run_module(MODULE, run_name="__main__")
