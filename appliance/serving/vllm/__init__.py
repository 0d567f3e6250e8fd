"""Code that runs inside the worker's process; only this package imports vllm."""
