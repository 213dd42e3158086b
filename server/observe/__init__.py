"""Metrics, request and throughput logs, traces."""
