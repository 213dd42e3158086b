"""Proposers, and the verification of their proposals."""
