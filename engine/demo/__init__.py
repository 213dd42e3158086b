"""The built-in pair and the text it was trained on: corpus.py, chat.py and practice.py write it,
tokens.py turns it into ids. The engine does not import this package; it loads the folders' models.
"""
