"""Attention over paged KV with ancestor masks."""
