"""Competing tenants: who is admitted next, who is preempted, and that nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from tests.support.audit import audit
from tests.unit.test_scheduler import k_of, run, scheduler_of, sequence


def of(tenant: str, count: int, *, size: int = 4, **fields: object) -> list[Sequence]:
    """Return `count` requests of a tenant, of `size` tokens each."""
    return [
        sequence(f"{tenant}{i}", [ord(tenant[0]), i] * (size // 2), tenant=tenant, **fields)  # type: ignore[arg-type]
        for i in range(count)
    ]


def order_of_admission(scheduler: Scheduler) -> list[str]:
    """Return the tenants in order of admission if each request ends with its first token."""
    order: list[str] = []
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(k_of(0))
        order += [seq.tenant for seq in plan.admitted]
        run(scheduler, plan)
        for seq in list(scheduler.running):
            scheduler.finish(seq, "length")
    return order


def test_a_quiet_tenant_is_next_beside_a_noisy_one() -> None:
    """Law: a tenant whose 5 requests come after another one's 500 gets every other place, until all
    of its own are served."""
    scheduler = scheduler_of(sequences=1)
    for seq in [*of("noisy", 500), *of("quiet", 5)]:
        scheduler.add(seq)
    order = order_of_admission(scheduler)
    assert order[:10] == ["quiet", "noisy"] * 5
    assert Counter(order) == {"noisy": 500, "quiet": 5}


def test_shares_are_in_tokens_and_by_weight() -> None:
    """Law: while all tenants have waiting requests, tokens served are proportional to the weights,
    however many requests they belong to."""
    scheduler = scheduler_of(sequences=1)
    for seq in [*of("a", 300, size=4), *of("b", 300, size=16), *of("c", 300, size=8, weight=2.0)]:
        scheduler.add(seq)
    size = {"a": 4 + 1, "b": 16 + 1, "c": 8 + 1}  # with the token that is generated
    served: Counter[str] = Counter()
    for tenant in order_of_admission(scheduler)[:200]:
        served[tenant] += size[tenant]
    assert served["b"] == pytest.approx(served["a"], abs=2 * 17)
    assert served["c"] == pytest.approx(2 * served["a"], abs=4 * 17)


def test_an_unused_share_is_not_saved_up() -> None:
    """Law: a tenant that arrives late starts level with the others, without credit for what they
    were served before."""
    scheduler = scheduler_of(sequences=1)
    for seq in of("early", 100):
        scheduler.add(seq)
    for _ in range(50):
        plan = scheduler.schedule(k_of(0))
        run(scheduler, plan)
        scheduler.finish(plan.admitted[0], "length")
    for seq in of("late", 50):
        scheduler.add(seq)
    order = order_of_admission(scheduler)
    assert abs(order[:20].count("late") - 10) <= 1


def filled(count: int, *, priority: int = 0) -> tuple[Scheduler, list[Sequence]]:
    """Return a scheduler with all places taken by one tenant, which has no waiting requests."""
    scheduler = scheduler_of(sequences=count)
    running = of("noisy", count, max_tokens=1000, priority=priority)
    for seq in running:
        scheduler.add(seq)
    run(scheduler, scheduler.schedule(k_of(0)))
    assert scheduler.running == running
    return scheduler, running


def test_a_tenant_with_every_place_gives_one_up_at_once() -> None:
    """Law: a quiet tenant's request runs in the very next step; the noisy tenant's youngest request
    is preempted, keeps its text, and returns."""
    scheduler, running = filled(4)
    [quiet] = of("quiet", 1)
    scheduler.add(quiet)
    plan = scheduler.schedule(k_of(0))
    assert plan.preempted == [running[-1]]
    assert plan.admitted == [quiet]
    run(scheduler, plan)
    scheduler.finish(quiet, "stop")
    assert scheduler.schedule(k_of(0)).admitted == [running[-1]]


def test_preemption_ends_at_equal_shares() -> None:
    """Law: with equal weights preemption ends at half of the places each."""
    scheduler, _ = filled(4)
    for seq in of("quiet", 4, max_tokens=1000):
        scheduler.add(seq)
    preempted = 0
    for _ in range(20):
        plan = scheduler.schedule(k_of(0))
        preempted += len(plan.preempted)
        run(scheduler, plan)
    assert Counter(seq.tenant for seq in scheduler.running) == {"noisy": 2, "quiet": 2}
    assert preempted == 2


@pytest.mark.parametrize("count", [4, 6])
def test_a_new_tenants_first_step_runs_alone(count: int) -> None:
    """Bug: a quiet tenant's prefill ran in one step with a noisy tenant's whole batch, so its first
    token took as long as that batch. Law: if one tenant has most of the batch, a new tenant's
    prefill runs in a step alone, with or without a free place, but never in two steps in a row."""
    scheduler = scheduler_of(sequences=5)
    for seq in of("noisy", count, max_tokens=1000):
        scheduler.add(seq)
    run(scheduler, scheduler.schedule(k_of(0)))
    alone = []
    for tenant in ("quiet", "other", "third", "", "fourth"):
        for seq in of(tenant, 1, max_tokens=1000) if tenant else ():
            scheduler.add(seq)
        plan = scheduler.schedule(k_of(0))
        assert [seq.tenant for seq in plan.admitted[:1]] == ([tenant] if tenant else [])
        alone.append([chunk.seq.tenant for chunk in plan.chunks] == [tenant])
        run(scheduler, plan)
        assert len(scheduler.running[0].tokens) == 5 + len(alone) - sum(alone)
    assert alone == [True, False, True, False, False]


def test_a_full_cache_is_shared_too() -> None:
    """Law: if places are free but one tenant's KV fills the cache, another one's request runs a
    step later."""
    scheduler = scheduler_of(blocks=12, sequences=8)
    for i in range(5):
        scheduler.add(
            sequence(f"n{i}", [i] * 6, max_tokens=40, tenant="noisy"),
        )
    for _ in range(2):
        run(scheduler, scheduler.schedule(k_of(0)))
    [quiet] = of("quiet", 1, size=8)
    scheduler.add(quiet)
    for _ in range(2):
        run(scheduler, scheduler.schedule(k_of(0)))
    assert quiet.status == "running"
    audit(scheduler)


@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_the_tenant_with_the_most_blocks_is_preempted_first(weight: float) -> None:
    """Bug: when the cache was full, the youngest request was preempted, whichever request grew: a
    quiet tenant's only request was recomputed because of a noisy one. Law: the tenant with the most
    blocks by weight is preempted, and every request finishes."""
    scheduler = scheduler_of(blocks=16, sequences=8)
    for i in range(4):
        scheduler.add(sequence(f"n{i}", [i] * 6, max_tokens=24, tenant="noisy", weight=weight))
    run(scheduler, scheduler.schedule(k_of(0)))
    [quiet] = of("quiet", 1, size=6, max_tokens=24)
    scheduler.add(quiet)
    preempted = Counter[str]()
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(k_of(0))
        preempted.update(seq.tenant for seq in plan.preempted)
        run(scheduler, plan)
        audit(scheduler)
        for seq in [seq for seq in scheduler.running if not scheduler.room(seq)]:
            scheduler.finish(seq, "length")
    assert preempted["noisy"] > 0
    assert (preempted["quiet"] > 0) == (weight > 1)


def test_a_higher_priority_is_not_preempted() -> None:
    """Law: priority comes before fair shares."""
    scheduler, _ = filled(4, priority=-1)
    for seq in of("quiet", 1):
        scheduler.add(seq)
    plan = scheduler.schedule(k_of(0))
    assert not plan.preempted
    assert not plan.admitted


def test_the_oldest_is_not_passed_over_for_ever() -> None:
    """Bug: a stream of high-priority requests starved all others. Law: every fourth admission is
    that of the oldest request."""
    scheduler = scheduler_of(sequences=1)
    for i in range(3):
        scheduler.add(sequence(f"old{i}", [i], priority=5, number=i))
    order = []
    for i in range(12):
        scheduler.add(sequence(f"urgent{i}", [i], priority=-5, number=100 + i))
        scheduler.add(sequence(f"urgent{i}b", [i], priority=-5, number=200 + i))
        plan = scheduler.schedule(k_of(0))
        order += [seq.id for seq in plan.admitted]
        run(scheduler, plan)
        scheduler.finish(plan.admitted[0], "length")
    assert [i for i, name in enumerate(order) if name.startswith("old")] == [3, 7, 11]
