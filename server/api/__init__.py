"""The HTTP API: routes, schemas, errors and server-sent events."""
