"""From logits to adjusted logits to draws with keyed noise."""
