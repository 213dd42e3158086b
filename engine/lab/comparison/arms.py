"""Arms: off, a fixed K, or the controller; how they are written on a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

MAX_K = 16  # that any configuration allows (config.FixedConfig)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to choose K. `k` is that of `fixed` alone. `served`: whatever a server does that
    cannot be switched. `other`: another server, named by `label`, as it is."""

    mode: Literal["off", "fixed", "auto", "served", "other"]
    k: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        if self.mode == "other":
            return self.label
        return f"K={self.k}" if self.mode == "fixed" else self.mode

    @property
    def is_switched(self) -> bool:
        """Whether it is a mode of one Foredraft, whose texts do not depend on the mode."""
        return self.mode in ("off", "fixed", "auto")


OFF, AUTO, SERVED = Arm("off"), Arm("auto"), Arm("served")


def parse_arms(text: str) -> tuple[Arm, ...]:
    """`off,1,2,4,auto`, each at most once. Raises ConfigError."""
    arms = [_parse(word.strip()) for word in text.split(",")]
    if len(set(arms)) < len(arms):
        raise ConfigError(f"--modes {text!r} names a mode twice")
    return tuple(arms)


def _parse(word: str) -> Arm:
    if word in ("off", "auto"):
        return OFF if word == "off" else AUTO
    try:
        k = int(word)
    except ValueError:
        raise ConfigError(
            f"--modes has the unknown mode {word!r}; allowed are off, auto,"
            f" and K itself, from 1 to {MAX_K}"
        ) from None
    if not 1 <= k <= MAX_K:
        raise ConfigError(f"--modes has K = {k}; K is from 1 to {MAX_K}, and no guesses are `off`")
    return Arm("fixed", k)
