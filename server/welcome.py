"""What a newcomer reads when the engine is ready."""

from __future__ import annotations

from server.config import Config


def welcome(config: Config, port: int) -> str:
    """The address, and a command to try."""
    host = config.server.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url, name = f"http://{host}:{port}/v1", config.model_name
    key = " -H 'Authorization: Bearer '$KEY" if config.server.api_key else ""
    body = f'{{"model": "{name}", "prompt": "def fibonacci(n):\\n", "stream": true}}'
    return (
        f"Foredraft serves {name} at {url}\n"
        f"  curl -N {url}/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )
