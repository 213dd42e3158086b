"""Synthetic pairs: random models of any size, whose draft has a chosen acceptance by its target.

For measurements only: the cost of a step does not depend on the values of the weights, and the
acceptance can be chosen. `python -m engine.lab.synthetic --output DIR`.
"""
