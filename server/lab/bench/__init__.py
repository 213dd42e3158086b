"""`foredraft bench --url`: the comparison (engine.lab.comparison) asked of a running server."""
