"""The programs that made the built-in pair: train.py (both models of model.py at once), distill.py
(the draft alone), text.py (the Medusa heads' text), card.py and skills.py (figures)."""
