"""One engine step: its forward, acceptance, record and metrics."""
