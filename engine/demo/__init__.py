"""The built-in pair: a target, its draft, and everything that made them.

corpus.py, chat.py (text) -> tokens.py (ids) -> train.py (both models of model.py at once) ->
distill.py (the draft alone, on what the target writes) -> card.py (the figures in README.md).
text.py writes such text to a file, for `foredraft train medusa`, which made the heads.
Nothing of the engine imports this package; the models are loaded by their folders.
"""

from engine.attention.torchao_warnings import silence

silence()  # its modules begin by importing transformers
