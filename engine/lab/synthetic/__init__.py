"""Synthetic pairs: random models of any size whose draft agrees with its target as often as asked.

For measurements only: what a step costs does not depend on what the weights say, and how often a
draft is right can be set. `python -m engine.lab.synthetic --output DIR`.
"""

from engine.attention.torchao_warnings import silence

silence()  # its modules begin by importing transformers
