"""Recorded replies of whole servers to 200 requests; no token of them may change."""
