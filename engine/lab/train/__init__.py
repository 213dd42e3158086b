"""Training beside a frozen target: `foredraft train draft`, and parts of `train demo`.

data.py (rows of token ids) and writing.py (those that the target writes) -> learning.py (distance,
optimizer) -> loop.py (steps until the budget has passed, checkpoints) -> agreement.py (the report).
What is trained is the business of each program alone: draft.py, medusa.py.
"""

from engine.attention.torchao_warnings import mute

mute()  # its modules begin by importing transformers
