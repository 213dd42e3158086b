"""The built-in pair: a target, its draft, and the code that trains them.

corpus.py, chat.py, practice.py (text) -> tokens.py (ids) -> train.py (both models of model.py at
once) -> distill.py (the draft alone, on text that the target generates) -> card.py (the figures in
README.md). text.py writes such text to a file for `foredraft train medusa`, which made the heads.
The engine does not import this package; it loads the models from their folders.
"""
