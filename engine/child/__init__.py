"""What the engine process asks of its operating system."""
