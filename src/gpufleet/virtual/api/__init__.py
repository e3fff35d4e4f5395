"""The functions of the CUDA Driver API, a file for each chapter of its reference manual."""
