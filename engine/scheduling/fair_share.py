"""FairShare: which tenant's request runs next when several tenants compete.

Each tenant has a counter of tokens served, divided by its weight; the tenant with the lowest
counter is next. This is deficit round robin for replies of unknown length (virtual token counters,
arXiv:2401.00588): prompt tokens are charged at the first admission, generated ones as they are
committed. With a single tenant nothing is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.scheduling.sequence import Sequence


class FairShare:
    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # by tenant: tokens / weight
        self._queued: Counter[str] = Counter()  # by tenant: waiting sequences
        self._floor = 0.0  # counter of the tenant that was served last

    def arrive(self, seq: Sequence) -> None:
        """Count `seq` as waiting. If its tenant had nothing waiting, raise the tenant's counter at
        least to the lowest one of the waiting tenants: unused share is not saved up."""
        tenant = seq.tenant
        if tenant not in self._queued:
            least = min((self._served[other] for other in self._queued), default=self._floor)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._queued[tenant] += 1

    def leave(self, seq: Sequence) -> None:
        """Count `seq` as no longer waiting."""
        self._floor = self._served[seq.tenant]
        self._queued[seq.tenant] -= 1
        if not self._queued[seq.tenant]:
            del self._queued[seq.tenant]

    def charge(self, seq: Sequence, tokens: int) -> None:
        self._served[seq.tenant] += tokens / seq.weight

    def first(self, waiting: Iterable[Sequence]) -> Sequence:
        """Return the first sequence of the tenant with the lowest counter. Of equal tenants, the
        one that appears last in `waiting`, since the others may have running sequences."""
        heads: dict[str, Sequence] = {}
        for seq in waiting:
            heads.setdefault(seq.tenant, seq)
            if len(heads) == len(self._queued):
                break
        return min(reversed(heads.values()), key=lambda seq: self._served[seq.tenant])

    def is_crowded_out(self, head: Sequence, running: Seq[Sequence]) -> bool:
        """Whether `head`'s tenant has nothing running while another has most of the batch."""
        count = Counter(seq.tenant for seq in running)
        return head.tenant not in count and 2 * max(count.values(), default=0) > len(running)

    def holds_most(self, able: Iterable[Sequence], running: Iterable[Sequence]) -> str:
        """Return the tenant in `able` with the most blocks divided by its weight."""
        held = Counter[str]()
        for seq in running:
            held[seq.tenant] += len(seq.blocks)
        return max(able, key=lambda seq: held[seq.tenant] / seq.weight).tenant

    def victim_for(self, head: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """Return the sequence to preempt for `head`: the youngest of the tenant with the most
        running sequences divided by weight, if that tenant then still has no fewer than `head`'s.
        So two tenants never preempt each other in turns. `running`: in order of admission."""
        if not running:
            return None
        count = Counter(seq.tenant for seq in running)
        most = max(running, key=lambda seq: count[seq.tenant] / seq.weight)
        if (count[most.tenant] - 1) / most.weight < (count[head.tenant] + 1) / head.weight:
            return None
        its = (seq for seq in reversed(running) if seq.tenant == most.tenant)
        return next((seq for seq in its if seq.params.priority >= head.params.priority), None)
