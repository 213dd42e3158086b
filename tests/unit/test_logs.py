"""The text and JSON forms of the log."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from engine.logs import JsonFormatter, log_fields

LOGGER = logging.getLogger("tests.logs")


def as_json(record: logging.LogRecord) -> dict[str, Any]:
    (line,) = JsonFormatter().format(record).splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_is_one_object() -> None:
    """Law: a record is one line of JSON, even with line breaks or a lone surrogate in its message;
    an exception is a member of the object."""
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        failure = sys.exc_info()
    record = logging.LogRecord(
        "a.b", logging.WARNING, "f.py", 1, "said %s", ("one\ntwo \ud800",), failure
    )
    record.created = 0.5
    found = as_json(record)
    assert found.pop("exception").startswith("Traceback (most recent call last):\n")
    assert found == {
        "time": "1970-01-01T00:00:00.500+00:00", "level": "warning", "logger": "a.b",
        "message": "said one\ntwo \ud800",
    }  # fmt: skip


def test_fields_are_members(caplog: Any) -> None:
    """Law: both forms hold the same fields, and omit those that are None."""
    caplog.set_level("INFO")
    log_fields(LOGGER, logging.INFO, "done 100 %", {"count": 3, "none": None, "name": "x"})
    log_fields(LOGGER, logging.DEBUG, "not so loud", {})
    (record,) = caplog.records
    assert record.getMessage() == "done 100 % count=3 name=x"
    found = as_json(record)
    assert (found["message"], found["count"], found["name"]) == ("done 100 %", 3, "x")
    assert "none" not in found
