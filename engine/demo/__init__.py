"""The built-in pair: a target, its draft, and everything that made them.

corpus.py, chat.py (text) -> tokenizer.py -> train.py (both models at once) -> distill.py (the
draft alone, on what the target writes: writer.py) -> card.py (the figures in README.md). Nothing
of the engine imports this package; the models are loaded by their folders.
"""

from engine.attention.torchao_warnings import mute

mute()  # its modules begin by importing transformers
