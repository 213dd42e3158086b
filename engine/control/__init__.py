"""The choice of K: acceptance, cost model and exploration. No torch."""
