"""Tool calls in text: which form a model writes them in, reading them, and forcing them."""
