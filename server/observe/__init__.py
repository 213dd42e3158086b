"""Metrics and what they are computed from."""
