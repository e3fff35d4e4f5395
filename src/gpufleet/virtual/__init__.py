"""The virtual driver: CUDA devices on the CPU."""
