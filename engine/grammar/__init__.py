"""Grammars: sources, compilation, matchers and the check in a child process."""
