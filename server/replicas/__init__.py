"""Many replicas of one model as one server."""
