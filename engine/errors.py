"""Errors that an operator or a user can see; the message says what was given and what is allowed.

EngineError
 +-- ConfigError       the configuration cannot be served (at start; exit code 2)
 +-- ModelError        a model folder is missing, corrupt, unsupported, or a pair does not fit
 +-- MemoryPlanError   weights and KV cache do not fit the memory that was granted
 +-- TraceError        a trace or id log cannot be written, or cannot be read by this program
 +-- EngineLost        the engine process died or hung; open requests end with this
"""

from __future__ import annotations

EXIT_CANNOT_START = 2  # exit code of an engine process whose construction raised an EngineError


LONGEST = 300  # characters quoted from a library's message


def one_line(message: object, most: int | None = LONGEST) -> str:
    """Return a message on one line, cut to `most` characters (None: uncut)."""
    return " ".join(str(message).split())[:most]


class EngineError(Exception):
    """Base of every error that is meant for a person to read."""


class ConfigError(EngineError):
    """The configuration is contradictory or names something unknown."""


class ModelError(EngineError):
    """A model cannot be loaded, is of an unsupported architecture, or does not fit its partner."""


class MemoryPlanError(EngineError):
    """The memory that was granted cannot hold the weights and one full-length sequence."""


class TraceError(EngineError):
    """A recording cannot be written, or a file is not a recording of this version."""


class EngineLost(EngineError):
    """The engine process died or hung; raised in the front end for every open request."""
