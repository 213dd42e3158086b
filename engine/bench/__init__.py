"""Benchmarks of the engine: the suite that `make bench` runs."""
