"""Offline programs: benchmarks, replay, planning and synthetic models."""
