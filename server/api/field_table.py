"""The tables of all request fields, made from their declarations. `python -m
server.api.field_table` prints them for docs/api.md."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from server.api.fields import FieldRow
from server.api.request import RequestBody
from server.api.schema import ChatRequest, CompletionRequest
from server.api.schema_anthropic import MessagesRequest
from server.api.schema_responses import ResponsesRequest
from server.api.tokenize import DetokenizeRequest, TokenizeRequest

TABLES: Sequence[Mapping[str, type[RequestBody]]] = (  # by path
    {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": MessagesRequest,
    },
    {"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest},
)
ROWS = {path: request.rows() for table in TABLES for path, request in table.items()}


def markdown() -> str:
    """Return the tables of docs/api.md."""
    return "\n\n".join(map(_table, TABLES))


def _table(paths: Collection[str]) -> str:
    """Return a table sorted by field name, with a line for each distinct row of a field."""
    lines = [["field", *paths, "allowed", "meaning"], ["---"] * (len(paths) + 3)]
    for name in sorted({name for path in paths for name in ROWS[path]}):
        rows: list[FieldRow] = []
        for row in (ROWS[path].get(name) for path in paths):
            if row is not None and row not in rows:
                rows.append(row)
        for row in rows:
            status = [row.kind if ROWS[path].get(name) == row else "-" for path in paths]
            lines.append([f"`{name}`", *status, row.allowed, row.meaning])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
