"""Which K pays: acceptance, cost model and exploration. No torch."""
