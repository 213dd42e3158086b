"""Logging of both processes, on stderr: text lines for people, or JSON lines for machines.

Logged facts about a request are counts, times or members of fixed sets: never a prompt, a reply, a
key or any other text from a client.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# Passes the format to the engine process. The operator's variables have two underscores.
VARIABLE = "FOREDRAFT_LOG_FORMAT"
# Clears the progress that a front end may have drawn on this line of a terminal.
CLEAR = "\r\x1b[K"


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: `time` (UTC), `level`, `logger`, `message`, `exception` if
    there is one, and the fields passed to `log_fields`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def log_fields(logger: logging.Logger, level: int, message: str, fields: dict[str, Any]) -> None:
    """Log a message and its fields: as `name=value` after the message, or as members of the JSON
    object. Fields that are None are omitted."""
    if logger.isEnabledFor(level):
        known = {name: value for name, value in fields.items() if value is not None}
        text = " ".join([message, *(f"{name}={value}" for name, value in known.items())])
        logger.log(level, "%s", text, extra={"event": message, "fields": known})


def configure_logging(level: str, form: str | None = None) -> None:
    """Log one line per event. `form`: a LogFormat, also for the processes that this one starts;
    None: the format of the process that started this one."""
    if form is None:
        form = os.environ.get(VARIABLE, "text")
    os.environ[VARIABLE] = form
    handler, drawn = logging.StreamHandler(sys.stderr), sys.stderr.isatty()
    text = logging.Formatter(f"{CLEAR * drawn}%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(form == "json")
