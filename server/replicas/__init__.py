"""A replica (everything that serves an engine except HTTP), and many replicas as one server."""
