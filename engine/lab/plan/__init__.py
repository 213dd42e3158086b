"""`foredraft plan`: whether speculation pays, on paper. No weights, no torch, no network.

shapes (what a config.json says) and devices -> roofline (time of one forward pass) -> scenario
(time of one round, speed-up, best K) -> card, report, plots, examples.
"""
