"""One engine step: forward, acceptance, record and metrics."""
