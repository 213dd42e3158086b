"""Benchmarks: modes against each other (`foretoken bench`), and the suite of `make bench`."""
