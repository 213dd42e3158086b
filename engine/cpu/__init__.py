"""Numba-compiled code for CPUs."""
