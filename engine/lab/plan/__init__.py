"""`foredraft plan`: whether speculation pays, on paper. No weights, no torch, no network.

shape (what a config.json says) -> roofline (time of a pass and of a round) -> card.
"""
