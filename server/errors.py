"""What a request can meet on its way to the engine and back. `api.errors` gives each a status."""

from __future__ import annotations

from engine.errors import EngineError, EngineLost


class QueueFull(EngineError):
    """There is no room for the request now: too much is in flight, or too many grammars are being
    compiled. `retry_seconds`: when there may be, if that is known."""

    def __init__(self, message: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class NotReady(EngineLost):
    """The engine takes no requests at the moment; nothing was submitted. `retry_seconds`: when it
    may, if that is known."""

    def __init__(self, message: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class DeadlineExceeded(EngineError):
    """The request took longer than it may."""


class GrammarRefused(EngineError):
    """A grammar cannot be honoured. `param`: the field that asks for it; None: no grammar can."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class GenerationFailed(EngineError):
    """The engine ended a sequence with an error; the message is its sentence. `bad_request`: the
    request itself is to blame, and `param` the field with its grammar."""

    def __init__(self, message: str, *, bad_request: bool = False) -> None:
        super().__init__(message)
        self.bad_request = bad_request
        self.param: str | None = None


class ChatTemplateError(EngineError):
    """The model has no chat template, or its template refuses these messages (a caller's error)."""
