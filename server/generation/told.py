"""Told: what has left of a reply, for whoever would have another replica go on with it."""

from __future__ import annotations

from dataclasses import dataclass, field

TOLD = "foredraft.told"  # among the `extensions` of an ASGI scope


@dataclass(slots=True)
class Told:
    """`id` and `created`, where they are given, are what the reply goes on under. `tokens`: of the
    first choice, those whose text has left since they were last taken from here."""

    id: str = ""
    created: int = 0
    seed: int | None = None
    fingerprint: str = ""
    tokens: list[int] = field(default_factory=list)

    def begin(self, id: str, created: int, *, seed: int, fingerprint: str) -> tuple[str, int]:
        """The id and the time that the reply tells."""
        self.id, self.created = self.id or id, self.created or created
        self.seed, self.fingerprint = seed, fingerprint
        return self.id, self.created

    def take(self) -> list[int]:
        tokens, self.tokens = self.tokens, []
        return tokens
