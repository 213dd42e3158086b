"""Logits to final log-probabilities to keyed draws."""
