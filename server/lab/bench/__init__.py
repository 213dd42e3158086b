"""`foredraft bench --url`: the comparison (engine.lab.comparison) asked of running servers."""
