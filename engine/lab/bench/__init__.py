"""Benchmarks: modes against each other (`foredraft bench`), and the suite of `make bench`."""
