"""Which sequences run in a step, over which positions, in which KV blocks. No torch."""
