"""The engine: token ids in, token ids out. README.md beside this file is the map.

Importing this package costs nothing; `engine.messages`, `engine.config` and `engine.errors` are the
contract, and the only modules that the server may import.
"""
