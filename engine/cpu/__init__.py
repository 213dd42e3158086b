"""Code compiled for CPUs by numba."""
