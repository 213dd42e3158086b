"""`foredraft bench --url`: the comparison of engine.lab.comparison, on running servers."""
