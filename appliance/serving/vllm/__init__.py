"""What runs inside the worker's process; the only package that imports vllm."""
