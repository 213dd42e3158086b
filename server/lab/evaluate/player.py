"""PromptServer: runs the user's prompts under each of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import ConfigError
from engine.lab.comparison.figures import Run
from engine.lab.comparison.workload import Lane, Request
from server.lab.bench.client import Client, Refused
from server.lab.bench.player import Server
from server.lab.evaluate.prompts import Prompt
from server.lab.evaluate.settings import Settings


class PromptServer(Server):
    """A Server whose requests give the index of one of `prompts` as their `prompt`; no reply is
    longer than `longest` tokens."""

    def __init__(
        self, client: Client, prompts: Sequence[Prompt], settings: Settings, longest: int
    ) -> None:
        super().__init__(client)
        self._prompts, self._settings, self._longest = prompts, settings, longest

    def check(self) -> None:
        """Send every prompt once, before measuring. Raises ConfigError, with the line of the
        prompt, if the server refuses one."""
        for i, prompt in enumerate(self._prompts):
            try:
                self._play([[Request(str(i), 0.0, i, 1)]], {})
            except Refused as error:
                raise ConfigError(f"{prompt.where}: {error.message}") from None

    def warm(self, prompts: Sequence[str]) -> None:
        """Do nothing: prefill is part of what is measured, and prefix caching is off."""

    def ask(self, lanes: Sequence[Lane], *, cold: bool) -> Run:
        """Run all lanes under a salt of their own: `suffix` remembers no reply of other runs."""
        return super().ask(lanes, cold=True)

    def _body(self, request: Request) -> tuple[str, dict[str, Any]]:
        prompt = self._prompts[int(request.prompt)]
        body = prompt.limited(min(request.tokens, self._longest))
        body |= {"model": self.model, "return_token_ids": True}
        body["stream"] = body.keys().isdisjoint({"best_of", "prompt_logprobs"})
        if self._mode and (proposers := self._settings[self._mode]):
            body["speculation"] = {"proposers": proposers}
        return prompt.path, body
