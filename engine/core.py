"""Engine: runs the eight phases of a step in order, over parts that it builds from the config.

Owns only the step: the scheduler owns tokens and blocks, the cache KV, each proposer its drafts,
and the controller K. A plain object: no sockets, no text, no threads. An exception inside a step is
fatal to the process by design: half-updated state must not serve. A bad request never gets that
far: `add` answers it with an Output that has an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from engine.config import EngineConfig
from engine.control.controller import KController, Load
from engine.control.modes import Modes, build_controller
from engine.control.profile import Profile
from engine.cpu.ahead import compiled_ahead
from engine.grammar.compiler import PendingGrammars
from engine.messages import (
    Mode,
    Output,
    Outputs,
    Ready,
    SamplingParams,
    StepMetrics,
    StepSeconds,
    Submit,
    proposers_of,
)
from engine.model.draws import Draws, build_draws
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel
from engine.model.loader import pick_device
from engine.model.pair import Pair, build_cache, load_pair, runner_of, vocabulary_of
from engine.model.runner import ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.memory import MemoryPlan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.step_record import StepRecord
from engine.scheduling.validation import refusal
from engine.speculation.allowance import Allowance
from engine.speculation.build import build_free, build_proposer
from engine.speculation.cascade import Cascade
from engine.speculation.prediction import NAME as PREDICTION
from engine.speculation.proposal import GRAMMAR, Proposer
from engine.step.acceptance import Acceptor, Sampled
from engine.step.clock import Overhead, Stopwatch
from engine.step.draft_swap import DraftSwap
from engine.step.id_log import open_id_log
from engine.step.observe import measure, observe
from engine.step.profiling import profile_at_start
from engine.step.report import final_output, output_of, ready_message, resumed_output
from engine.step.rounds import Rounds
from engine.step.trace import open_trace

logger = logging.getLogger(__name__)


class Engine:
    """Call `add` and `abort` at any time between steps, and `step` while `has_work`.

    For benchmarks and tests: `pair` (loaded models), `proposer` (replaces the configured one),
    `cache` (part of a cache), `controller` (a function that builds it). `measured`:
    `Ready.measured` of an earlier engine with this configuration on this machine; then no step is
    timed, and cache pages are populated in the background. Raises ConfigError, ModelError or
    MemoryPlanError.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
        pair: Pair | None = None,
        proposer: Proposer | None = None,
        cache: KVCache | None = None,
        controller: Callable[..., KController] = build_controller,
        measured: bytes = b"",
    ) -> None:
        self._clock, self._max_sequences = clock, config.schedule.max_sequences
        stopwatch, known = Stopwatch(time.perf_counter), _profile_in(measured)
        with compiled_ahead(pick_device(config.device).type):
            pair = pair or load_pair(config)
        target, loaded = pair.target, stopwatch()
        self._cache, memory = build_cache(config, pair, cache, later=known is not None)
        draft = None
        if pair.draft is not None:
            draft = runner_of(config, pair.draft, self._cache, clock, translation=pair.translation)
        self._processor = LogitsProcessor(target.eos_ids)
        draws = build_draws(self._processor, target.vocab_size, target.device, self._max_sequences)
        stops = draft is not None and not draft.chains
        self._trees = config.speculation.proposer.trees
        self._controller = Modes(controller(config.speculation, stops=stops, trees=self._trees))
        main = proposer or self._main_proposer(config, pair, draft, draws)
        self._build_phases(config, target, main, draws)
        profile = self._step_costs(config, draft, known, loaded, stopwatch)
        self._num_steps, self._num_added, self._overhead = 0, 0, Overhead()
        self._pending, self._ids = list[Output](), set[str]()  # final Outputs to report; ids in use
        self._new = list[Sequence]()  # those that were admitted in this step for the first time
        self._swap = DraftSwap(
            config, target, main, draft, cache=self._cache, measured=profile,
            modes=self._controller, scheduler=self._scheduler, allowance=self._allowance,
            clock=clock,
        )  # fmt: skip
        self.ready = self._ready_message(config, target, memory, profile)
        self._trace = open_trace(config, self.ready, profile, stops=stops)
        self._id_log = open_id_log(config.speculation, target.vocab_size)

    def _build_phases(
        self, config: EngineConfig, target: LoadedModel, main: Proposer, draws: Draws
    ) -> None:
        """Set what schedules, proposes, verifies and accepts."""
        self._compiling = PendingGrammars(
            lambda: vocabulary_of(config, target), can_end=bool(target.eos_ids)
        )
        self._pool = BlockPool(
            self._cache.num_blocks,
            config.cache.block_size,
            prefix_caching=config.cache.prefix_caching,
            blocks=self._cache.blocks,
        )
        self._scheduler = Scheduler(config.schedule, self._pool, max_model_len=target.max_model_len)
        free, branches = build_free(config.speculation), config.speculation.branches
        self._allowance = Allowance(self._controller, main.name, free, branches=branches)
        self._proposer = Cascade(main, free, limits=self._allowance.limits)
        self._runner = runner_of(config, target, self._cache, self._clock, main.hidden)
        vocab_size, device = target.vocab_size, target.device
        exact = DeviceDraws(self._processor, vocab_size, device, self._max_sequences)
        self._acceptor = Acceptor(draws, exact, eos_ids=target.eos_ids, room=self._scheduler.room)
        self._rounds = Rounds(
            self._proposer, main, self._allowance, self._runner, self._acceptor, draws
        )

    def _step_costs(
        self,
        config: EngineConfig,
        draft: ModelRunner | None,
        known: Profile | None,
        loaded: float,
        stopwatch: Stopwatch,
    ) -> Profile:
        """Return the costs of steps, `known` or timed now, which the controller also gets. With
        known ones a thread touches the cache from then on. `loaded`: seconds that loading took."""
        built, longest = stopwatch(), self._runner.model.max_model_len
        profile = known or profile_at_start(config, self._runner, draft, self._cache, longest)
        self._controller.costs.set_profile(profile)
        message = "models loaded in %.1f s, cache and runners made in %.1f s, steps timed in %.1f s"
        logger.info(message, loaded, built, stopwatch())
        if known is not None:
            self._cache.populate()
        return profile

    def _main_proposer(
        self, config: EngineConfig, pair: Pair, draft: ModelRunner | None, draws: Draws
    ) -> Proposer:
        return build_proposer(
            config,
            pair,
            draft,
            processor=self._processor,
            draws=draws,
            cache=self._cache,
            clock=self._clock,
            keeps_drafting=self._controller.keeps_drafting,
            # Whether the controller or a trace uses `agreements` (drafts compared in hindsight).
            compares=lambda: self._allowance.choice.uses_hindsight or self._trace is not None,
        )

    def _ready_message(
        self, config: EngineConfig, target: LoadedModel, memory: MemoryPlan, profile: Profile
    ) -> Ready:
        return ready_message(
            config,
            target,
            memory,
            max_len=self._scheduler.max_len,
            attention=self._runner.attention,
            k_max=self._controller.k_max,
            proposers=self._proposer.names,
            profile=profile,
        )

    # -- between steps -----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        scheduler = self._scheduler
        queued = self._pending or scheduler.running or scheduler.waiting or self._compiling
        return bool(queued) or self._swap.is_due

    def add(self, submit: Submit) -> None:
        """Queue a sequence. An invalid request gets an Output with an error in the next step."""
        reason = refusal(submit, self.ready)
        if submit.id in self._ids:
            reason = f"request id {submit.id!r} is already running"
        if reason:
            self._pending.append(Output(id=submit.id, finish="error", error=reason))
            return
        self._ids.add(submit.id)
        resumed = submit.begun
        seq = Sequence(
            id=submit.id,
            params=submit.params,
            tokens=submit.prompt + resumed.tokens,
            num_prompt=len(submit.prompt),
            number=self._num_added,
            arrival=submit.arrival,
            rounds=resumed.rounds,
            proposed=resumed.proposed,
            accepted=resumed.accepted,
            predicted=resumed.predicted,
            tenant=submit.tenant,
            weight=submit.weight,
            sources=self._sources(submit.params),
            follows_grammar=GRAMMAR in proposers_of(submit.params, self.ready),
        )
        self._num_added += 1
        if submit.params.grammar is None:
            self._queue(seq)
        else:
            self._compiling.add(seq)

    def _queue(self, seq: Sequence) -> None:
        """Queue a sequence; a resumed one that is already complete ends instead."""
        room = self._scheduler.room(seq)
        end = resumed_output(seq, self._acceptor, room) if seq.num_output else None
        if end is None:
            self._scheduler.add(seq)
        else:
            self._forget(seq)
            self._pending.append(end)

    def _sources(self, params: SamplingParams) -> tuple[str, ...] | None:
        """Return its proposers in order; None: only the main one, without a request's bound."""
        names = proposers_of(params, self.ready)
        if self._proposer.follows_grammar and self._proposer.name in names:
            names = tuple(name for name in names if name != GRAMMAR)
        bounded = params.speculation is not None and params.speculation.max_draft is not None
        return None if names == (self._proposer.name,) and not bounded else names

    def abort(self, ids: Iterable[str]) -> None:
        """End these sequences; unknown ids are ignored. The next step returns their Outputs."""
        ids = list(ids)
        for seq in self._scheduler.abort(ids) + self._compiling.abort(ids):
            self._forget(seq)
            self._pending.append(final_output(seq, "abort"))

    def set_speculation(self, mode: Mode, k: int = 0) -> None:
        """Set the mode from the next step on. Raises ConfigError. See messages.SetSpeculation."""
        self._controller.set(mode, k)

    def swap_draft(self, path: str) -> None:
        """Start loading a draft. Raises ConfigError while another loads. See messages.SwapDraft."""
        self._swap.begin(path)

    def gauges(self, seconds: StepSeconds | None = None) -> StepMetrics:
        """Return the current gauges; the sums over a step stay empty."""
        return StepMetrics(
            step=self._num_steps,
            seconds=seconds or StepSeconds(),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_total,
            estimates=self._controller.estimates(),
            swap=self._swap.next_outcome(),
        )

    # -- the step ----------------------------------------------------------------------------

    def step(self) -> Outputs:
        """Schedule, propose, verify, accept, commit, emit, observe, adapt."""
        if self._swap.is_due:
            self._swap.advance()
            self._overhead.pause()
        stopwatch = Stopwatch(self._clock)
        seconds = StepSeconds(around=self._overhead.begin(stopwatch))
        self._admit()
        plan = self._schedule(seconds, stopwatch)
        if not plan.chunks:
            if self._compiling and not self._pending:
                self._compiling.wait()
            return Outputs(self._take_pending(), self.gauges())
        sampled = self._rounds(plan, seconds, stopwatch)
        self._commit(plan, sampled)
        seconds.commit = stopwatch()
        items = self._take_pending() + [output_of(item) for item in sampled]
        seconds.emit = stopwatch()
        self._num_steps += 1
        record, metrics = self._observe(plan, sampled, seconds)
        self._adapt(record, stopwatch)
        return Outputs(items, metrics)

    def _admit(self) -> None:
        """Queue the sequences whose grammar has been compiled."""
        if self._compiling:
            ready, ends = self._compiling.take()
            for seq in ready:
                self._queue(seq)
            self._ids -= {output.id for output in ends}
            self._pending += ends

    def _schedule(self, seconds: StepSeconds, stopwatch: Stopwatch) -> StepPlan:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        if running or waiting:  # else the controller would see a batch of size 0
            num = min(len(running) + len(waiting), self._max_sequences)
            self._allowance.begin(Load(num, self._scheduler.mean_length), running)
        seconds.schedule = self._overhead.chose(stopwatch())
        plan = self._scheduler.schedule(self._allowance.draft_rows)
        for seq in plan.preempted:
            self._proposer.forget(seq)
        self._new = [seq for seq in plan.admitted if seq.queued is None]
        for seq in self._new:  # arrival is wall-clock time of another process
            seq.queued = max(time.time() - seq.arrival, 0.0)
        seconds.schedule += stopwatch()
        return plan

    def _commit(self, plan: StepPlan, sampled: list[Sampled]) -> None:
        """The only phase that adds tokens to sequences."""
        items = iter(sampled)  # in the order of the plan
        for chunk in plan.chunks:
            if not chunk.samples:
                self._scheduler.commit(chunk, [], 0)
                continue
            seq, item = chunk.seq, next(items)
            if item.tokens:
                proposed, accepted = len(item.proposal.tokens), item.num_accepted
                predicted = proposed if item.proposal.source == PREDICTION else 0
                if item.proposal.branches is not None:
                    kept = self._cache.move_path(seq.blocks, len(seq.tokens), item.path[:accepted])
                    seq.num_draft_computed = min(seq.num_draft_computed, kept)
                self._scheduler.commit(chunk, item.tokens, accepted, proposed, predicted)
        for item in sampled:
            if item.finish is not None:
                self._scheduler.finish(item.chunk.seq, item.finish)
                self._forget(item.chunk.seq)

    def _observe(
        self, plan: StepPlan, sampled: list[Sampled], seconds: StepSeconds
    ) -> tuple[StepRecord, StepMetrics]:
        record = observe(
            plan,
            sampled,
            seconds,
            num_waiting=len(self._scheduler.waiting),
            proposer=self._proposer,
            allowance=self._allowance,
            overhead=self._overhead,
            trees=self._trees,
        )
        main, plain = self._proposer.name, self._controller.costs.plain_seconds
        gauges = self.gauges(seconds)
        return record, measure(record, plan, gauges, new=self._new, main=main, plain_seconds=plain)

    def _adapt(self, record: StepRecord, stopwatch: Stopwatch) -> None:
        self._controller.update(record)
        if self._trace is not None:
            self._trace.write(record)
        self._overhead.end(stopwatch, self._allowance.choice.reason, more=self.has_work)

    def _forget(self, seq: Sequence) -> None:
        if self._id_log is not None:
            self._id_log.write(seq)
        self._proposer.forget(seq)
        self._processor.forget(seq)
        self._ids.discard(seq.id)

    def _take_pending(self) -> list[Output]:
        pending, self._pending = self._pending, []
        return pending


def _profile_in(measured: bytes) -> Profile | None:
    """Return the decoded profile; None if empty or from an incompatible version."""
    try:
        return msgspec.msgpack.decode(measured, type=Profile)
    except msgspec.DecodeError:
        return None
