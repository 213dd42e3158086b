"""Who guesses, and how guesses are checked."""
