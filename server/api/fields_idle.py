"""Rows of fields that change nothing: taken and not needed, or refused."""

from __future__ import annotations

from server.api.field_row import FieldRow, no_op, refused
from server.api.limits import MAX_LABEL_LENGTH, MAX_METADATA

NO_OP_ROWS: tuple[FieldRow, ...] = (
    no_op("user", f"a string of at most {MAX_LABEL_LENGTH} characters", "Not stored."),
    no_op(
        "metadata",
        f"an object of at most {MAX_METADATA} strings of at most {MAX_LABEL_LENGTH} characters",
        "Not stored.",
    ),
    no_op("store", "true or false", "Nothing is ever stored."),
    no_op(
        "service_tier",
        '"auto", "default", "flex", "scale", "priority" or "fast"',
        'There is one tier, and replies to requests with this field say "default".',
    ),
    no_op("safety_identifier", f"a string of at most {MAX_LABEL_LENGTH} characters", "Not stored."),
    no_op(
        "prompt_cache_key",
        f"a string of at most {MAX_LABEL_LENGTH} characters",
        "The prefix cache needs no hint.",
    ),
)

REFUSED_ROWS: tuple[FieldRow, ...] = (
    refused("audio", "Audio output."),
    refused("modalities", "Other output than text.", ["text"]),
    refused("verbosity", "Verbosity control.", "medium"),
    refused("web_search_options", "Web search."),
    refused("moderation", "Moderation."),
    refused("prompt_cache_options", "Cache control."),
    refused("prompt_cache_retention", "Cache control.", "in_memory"),
)
