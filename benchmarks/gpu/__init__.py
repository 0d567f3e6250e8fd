"""A benchmark of the appliance on one NVIDIA GPU, in steps that resume: `sh benchmarks/gpu/run.sh`."""
