"""OpenAI routes, schemas, errors and server-sent events."""
