"""Replies of whole servers to 200 requests, recorded; none may change by a token."""
