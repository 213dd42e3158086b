"""Whom to compare: nobody guessing, and each who may guess, under some K and the controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.lab.evaluate_messages import Mode
from engine.messages import Ready
from server.lab.evaluate.findings import PLAIN, Contender
from server.lab.evaluate.tasks import Task

DRAFT, NGRAM, BOTH, ALONE = "draft", "ngram", "ngram + draft", "draft alone"
KS = (1, 2, 4, 8)
NGRAM_KS = (8,)  # a look-up costs nothing to make, and is often right to its end
COMPANIONS = ("grammar", "prediction")


def contenders(ready: Ready, tasks: Iterable[Task]) -> list[Contender]:
    """K = 0 first. `draft` and `ngram` guess together with the free companions of a request (its
    grammar, its prediction); `draft alone`, without them, takes part if some request has any."""
    main = ready.proposer
    found = [Contender(PLAIN, "", Mode("off"))]
    companions = tuple(name for name in COMPANIONS if name in ready.proposers)
    if main == "draft_model":
        found += _family(DRAFT, (*companions, main), _up_to(KS, ready.k_max))
    configured = main != "draft_model"
    free = None if configured else (*companions, "ngram")
    found += _family(NGRAM, free, _up_to(NGRAM_KS, ready.k_max))
    if main == "draft_model":
        found += _family(BOTH, (*companions, "ngram", main), ())
        if any(task.submit.params.grammar or task.submit.params.prediction for task in tasks):
            found += _family(ALONE, (main,), ())
    return found


def _up_to(ks: Sequence[int], k_max: int) -> list[int]:
    """Those, and the largest K there is."""
    return sorted({*(k for k in ks if k <= k_max), min(max(ks), k_max)})


def _family(name: str, proposers: tuple[str, ...] | None, ks: Sequence[int]) -> list[Contender]:
    fixed = [
        Contender(f"{name} K={k}", name, Mode("fixed", k, proposers), deep=k == max(ks)) for k in ks
    ]
    return [*fixed, Contender(f"{name} auto", name, Mode("auto", 0, proposers))]
