"""Services: what all handlers share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
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

VERSION = version("foredraft")


@dataclass(kw_only=True)
class Services:
    """What the handlers work with; one per app."""

    config: Config
    tokenizer: Tokenizer
    client: EngineClient
    metrics: Metrics
    grammars: GrammarChecker
    keyring: Keyring
    tell: Callable[[Exchange], None] | None = None  # of each request that has ended

    @cached_property
    def admission(self) -> Admission:
        return Admission(
            self.client,
            self.config.max_inflight,
            max_waiting_tokens=self.config.server.max_waiting_tokens,
            pace=self.metrics.pace,
        )

    def known(self, model: str = "") -> Ready:
        """The engine's facts as last known, whether it runs or not. Raises NotReady (503) before it
        ever was ready, and as `check_model` where the request names a model."""
        if model:
            self.check_model(model)
        return self.client.ready or self.client.require_open()

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) unless the model goes by that name here."""
        names = self.config.model_names
        if name not in names:
            here = ", ".join(f"`{known}`" for known in names)
            said = f"there is no such model here; this server has {here}"
            raise ApiError(404, said, param="model", code="model_not_found")

    def fingerprint(self, ready: Ready) -> str:
        """Changes with whatever may change a reply to the same request: code, model, numerics.
        Speculation does not."""
        facts = (VERSION, ready.target, ready.dtype, ready.device, ready.attention)
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token; a text of more than that times the context cannot fit."""
        tokenizer = self.tokenizer
        return max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1)
