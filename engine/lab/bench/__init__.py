"""Benchmarks on engines in this process: `foredraft bench` and its presets."""
