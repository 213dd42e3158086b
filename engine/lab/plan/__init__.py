"""`foredraft plan`: predict whether speculation pays, from shapes alone. No weights, no network.

presets (find the config.json) -> shape (count weights and FLOPs) -> roofline (time a pass and a
round) -> card (print).
"""
