"""The settings that are compared (no speculation, and each proposer at some fixed K and under the
controller), and the server that runs the user's prompts under each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config import SpeculationConfig
from engine.errors import ConfigError
from engine.lab.comparison.figures import Run
from engine.lab.comparison.workload import OFF, Arm, Lane, Request
from server.lab.bench.client import Client, Refused
from server.lab.bench.player import Server
from server.lab.evaluate.prompts import Prompt

LOOKUPS = ("ngram", "suffix")
KS = (1, 2, 4, 8)
FREE_KS = (8,)  # free proposals cost nothing and are often accepted to their end

Settings = dict[Arm, tuple[str, ...]]  # each arm's `proposers` of a request; (): as configured


def settings_of(config: SpeculationConfig, main: str, *, free: bool, predicted: bool) -> Settings:
    """Return the proposers of each arm: no speculation; the main proposer, called `main`, alone and
    after each look-up (n-gram, and `suffix` if configured); if `free`, look-ups without it, and,
    if `predicted`, predictions. Other companions, such as grammar, propose in all arms."""
    kind = "ngram" if config.proposer.kind == "none" else config.proposer.kind
    given = tuple(name for name in config.companions if name not in LOOKUPS)
    suffix = config.remembered_tokens > 0 or "suffix" in config.companions
    lookups = [name for name in LOOKUPS if name != kind and (suffix or name == "ngram")]
    found: Settings = {OFF: ()}
    found |= _family(main, FREE_KS if kind in LOOKUPS else KS, (*given, kind))
    for name in lookups if kind not in LOOKUPS else ():
        found |= _family(f"{name} + {main}", (), (*given, name, kind))
    for name in [*lookups, *["prediction"] * predicted] if free else ():
        found |= _family(name, FREE_KS, tuple(dict.fromkeys((*given, name))))
    return found


def _family(name: str, ks: Sequence[int], proposers: tuple[str, ...]) -> Settings:
    """Return arms with each fixed K, then one under the controller."""
    arms = [Arm("fixed", k, f"{name} K={k}") for k in ks] + [Arm("auto", 0, f"{name} auto")]
    return dict.fromkeys(arms, proposers)


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
