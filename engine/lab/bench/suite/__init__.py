"""What `make bench` runs: speed, equality of texts and host overhead of a pair, in one run."""
