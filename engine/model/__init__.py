"""Any causal LM of transformers behind one paged forward."""
