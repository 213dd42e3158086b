"""Training beside a frozen target: `foredraft train draft`, and parts of `train demo`.

data.py (rows of token ids) and writing.py (those that the target writes) -> learning.py (distance,
optimizer) -> loop.py (steps until the budget has passed) -> agreement.py (the report). program.py
is what the programs share, checkpoints among it; what is trained is the business of each alone:
draft.py, medusa.py, eagle.py.
"""

from engine.attention.torchao_warnings import silence

silence()  # its modules begin by importing transformers
