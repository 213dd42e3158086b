"""The table of all request fields, from their declarations: `python -m server.api.field_table`
prints it for docs/api.md."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from server.api.fields import FieldRow
from server.api.request import RequestBody
from server.api.schema import ChatRequest, CompletionRequest
from server.api.schema_responses import ResponsesRequest
from server.api.tokenize import DetokenizeRequest, TokenizeRequest

Endpoint = Literal["completions", "chat", "responses", "tokenize", "detokenize"]
REQUESTS: Mapping[Endpoint, type[RequestBody]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
ROWS: Mapping[Endpoint, Mapping[str, FieldRow]] = {
    endpoint: request.rows() for endpoint, request in REQUESTS.items()
}
TABLES: tuple[tuple[Endpoint, ...], ...] = (
    ("completions", "chat", "responses"),
    ("tokenize", "detokenize"),
)


def markdown() -> str:
    """The tables of docs/api.md."""
    return "\n\n".join(map(_table, TABLES))


def _table(endpoints: Sequence[Endpoint]) -> str:
    """By name; a line for each that the endpoints say of it."""
    lines = [["field", *endpoints, "allowed", "meaning"], ["---"] * (len(endpoints) + 3)]
    for name in sorted({name for endpoint in endpoints for name in ROWS[endpoint]}):
        rows = {endpoint: ROWS[endpoint].get(name) for endpoint in endpoints}
        said = [row for i, row in enumerate(rows.values()) if row not in list(rows.values())[:i]]
        for row in filter(None, said):
            status = [row.kind if rows[endpoint] == row else "-" for endpoint in endpoints]
            lines.append([f"`{name}`", *status, row.allowed, row.meaning])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
