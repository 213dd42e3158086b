"""One replica: all that serves an engine but HTTP; and many of one model as one server."""
