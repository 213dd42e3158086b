"""Services: the objects that all handlers share."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

from engine.messages import Ready
from server.api.errors import ApiError
from server.config import Config
from server.engine.admission import Admission
from server.engine.client import EngineClient
from server.generation.structured import GrammarChecker
from server.keys import Keyring
from server.observe.exchange import Exchange
from server.observe.metrics import Metrics
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

VERSION = version("foredraft")
QUIET_SECONDS = 60.0  # between two log lines about unknown fields


@dataclass(kw_only=True)
class Services:
    """The objects that the handlers share; one instance per app."""

    config: Config
    tokenizer: Tokenizer
    client: EngineClient
    metrics: Metrics
    grammars: GrammarChecker
    keyring: Keyring
    on_end: Callable[[Exchange], None] | None = None  # called when a request has ended
    _quiet_until: float = field(default=0.0, init=False)

    @cached_property
    def admission(self) -> Admission:
        return Admission(
            self.client,
            self.config.max_inflight,
            max_waiting_tokens=self.config.server.max_waiting_tokens,
            pace=self.metrics.pace,
        )

    def known(self, model: str = "") -> Ready:
        """Return the engine's facts as last known, even if it is down. Raises NotReady (503) if it
        was never ready, and as `check_model` if the request names a model."""
        if model:
            self.check_model(model)
        return self.client.ready or self.client.require_open()

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) unless this server has a model of that name."""
        names = self.config.model_names
        if name not in names:
            here = ", ".join(f"`{known}`" for known in names)
            given = name if len(name) <= 100 else name[:97] + "..."
            message = f"the model `{given}` does not exist here; this server has {here}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def warn_of_unknown(self, names: str) -> None:
        """Log that a request's unknown fields were ignored, at most once in QUIET_SECONDS."""
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            logger.warning("unknown request fields were ignored: %s", names)

    def fingerprint(self, ready: Ready) -> str:
        """Return a hash of all that may change the reply to the same request: code, model and
        numerics. Speculation does not change it."""
        parts = (VERSION, ready.target, ready.dtype, ready.device, ready.attention)
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    @cached_property
    def longest_token(self) -> int:
        """Return the bytes in the longest token, which bounds the texts that fit the context."""
        tokenizer = self.tokenizer
        return max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1)
