"""`foredraft bench --url`: the comparison (engine.comparison) asked of a running server."""
