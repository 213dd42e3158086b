"""`foredraft plan`: whether speculation pays, on paper. No weights, no network.

presets (which config.json) -> shape (what that model multiplies) -> roofline (time of a pass and
of a round) -> card.
"""
