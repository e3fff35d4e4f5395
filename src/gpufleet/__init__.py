"""CUDA contexts that float between threads, over real and virtual GPUs."""
