"""FairShare: which tenant's request runs next, where several wait.

Tokens served are counted by tenant and divided by its weight; who was served least is next. That is
deficit round robin for replies whose length nobody knows ahead (virtual token counters,
arXiv:2401.00588): prompt tokens are counted at the first admission, generated ones as they come.
Where one tenant is alone nothing is searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.scheduling.sequence import Sequence


class FairShare:
    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # tokens by weight
        self._queued: Counter[str] = Counter()  # waiting sequences
        self._floor = 0.0  # of whoever was served last

    def arrive(self, seq: Sequence) -> None:
        """`seq` waits. A tenant that had nothing waiting begins level with the least served of
        those that had: what it did not use before is not saved up."""
        tenant = seq.tenant
        if tenant not in self._queued:
            least = min((self._served[other] for other in self._queued), default=self._floor)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._queued[tenant] += 1

    def leave(self, seq: Sequence) -> None:
        """`seq` waits no longer."""
        self._floor = self._served[seq.tenant]
        self._queued[seq.tenant] -= 1
        if not self._queued[seq.tenant]:
            del self._queued[seq.tenant]

    def charge(self, seq: Sequence, tokens: int) -> None:
        self._served[seq.tenant] += tokens / seq.weight

    def first(self, waiting: Iterable[Sequence]) -> Sequence:
        """Of these, in their order, the first one of the tenant that was served least; of equals
        the one whose first is last, since others may be running already."""
        heads: dict[str, Sequence] = {}
        for seq in waiting:
            heads.setdefault(seq.tenant, seq)
            if len(heads) == len(self._queued):
                break
        return min(reversed(heads.values()), key=lambda seq: self._served[seq.tenant])

    def is_crowded_out(self, head: Sequence, running: Seq[Sequence]) -> bool:
        """Whether `head`'s tenant has nothing running, beside one that has most of what runs."""
        count = Counter(seq.tenant for seq in running)
        return head.tenant not in count and 2 * max(count.values(), default=0) > len(running)

    def holds_most(self, able: Iterable[Sequence], running: Iterable[Sequence]) -> str:
        """Of the tenants of `able` the one that holds the most blocks by its weight."""
        held = Counter[str]()
        for seq in running:
            held[seq.tenant] += len(seq.blocks)
        return max(able, key=lambda seq: held[seq.tenant] / seq.weight).tenant

    def gives_way(self, head: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """Who has to give its place to `head`: of the tenant with the most running sequences by
        weight the youngest, if that tenant has no fewer than `head`'s after it. So two tenants
        never take places from each other in turns. `running`: in order of admission."""
        if not running:
            return None
        count = Counter(seq.tenant for seq in running)
        most = max(running, key=lambda seq: count[seq.tenant] / seq.weight)
        if (count[most.tenant] - 1) / most.weight < (count[head.tenant] + 1) / head.weight:
            return None
        its = (seq for seq in reversed(running) if seq.tenant == most.tenant)
        return next((seq for seq in its if seq.params.priority >= head.params.priority), None)
