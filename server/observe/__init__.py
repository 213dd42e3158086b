"""Metrics, logs of requests and throughput, traces."""
