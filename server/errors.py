"""Errors that a request can meet on its way. `api.errors` maps each to an HTTP status."""

from __future__ import annotations

from engine.errors import EngineError, EngineLost


class RetryLater(EngineError):
    """The request may be served later: in `retry_seconds` from now; None: unknown."""

    def __init__(self, message: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class QueueFull(RetryLater):
    """There is no room for the request now: too much is in flight, or too many grammars are being
    compiled."""


class NotReady(RetryLater, EngineLost):
    """The engine accepts no requests at the moment; nothing was submitted."""


class DeadlineExceeded(EngineError):
    """The request exceeded its time limit."""


class GrammarRefused(EngineError):
    """A grammar is not supported. `param`: the field that asks for it; None: no grammar is."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class GenerationFailed(EngineError):
    """The engine ended a sequence with an error; the message is the engine's. `bad_request`: the
    request itself is at fault, and `param` is the field with its grammar."""

    def __init__(self, message: str, *, bad_request: bool = False) -> None:
        super().__init__(message)
        self.bad_request = bad_request
        self.param: str | None = None


class ChatTemplateError(EngineError):
    """The model has no chat template, or its template refuses these messages (a client error)."""
