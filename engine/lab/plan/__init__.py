"""`foredraft plan`: predict whether speculation pays, from shapes alone. No weights, no network.

shape (find the config.json, count weights and FLOPs) -> roofline (time a pass and a round) -> card
(print).
"""
