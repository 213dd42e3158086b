"""ReplyProgress: how much of a reply was sent, so that another replica can continue it."""

from __future__ import annotations

from dataclasses import dataclass, field

PROGRESS = "foredraft.progress"  # among the `extensions` of an ASGI scope


@dataclass(slots=True)
class ReplyProgress:
    """`id` and `created`: of the reply; set before `begin` if an earlier replica began it.
    `tokens`: ids of the first choice whose text was sent since the last `take`. `spent`: seconds of
    the request's time limit that earlier replicas used."""

    id: str = ""
    created: int = 0
    spent: float = 0.0
    seed: int | None = None
    fingerprint: str = ""
    tokens: list[int] = field(default_factory=list)

    def begin(self, id: str, created: int, *, seed: int, fingerprint: str) -> tuple[str, int]:
        """Return the id and the time to write into the reply; an earlier replica's win."""
        self.id, self.created = self.id or id, self.created or created
        self.seed, self.fingerprint = seed, fingerprint
        return self.id, self.created

    def take(self) -> list[int]:
        tokens, self.tokens = self.tokens, []
        return tokens
