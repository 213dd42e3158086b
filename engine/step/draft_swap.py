"""DraftSwap: replaces the running draft model by another one while requests run.

A thread reads, checks and compiles the new draft. Its KV uses the same block ids as the running
draft's, in a plane of its own, or in the running draft's plane if both have the same shape: a swap
makes all draft KV useless anyway. Work that needs the device, or time between steps, is done in
pieces between steps: graphs, profile, the switch. Meanwhile nothing is proposed. The old draft is
kept until `control.draft_trial` has decided on the new one.

If anything is wrong with the new draft, the running one stays. Texts depend on neither.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

from engine.child import LOADING
from engine.config import DraftModelConfig, EngineConfig
from engine.control.controller import KController, Load
from engine.control.draft_trial import DraftTrial
from engine.control.modes import Modes, build_controller
from engine.control.profile import Profile
from engine.errors import ConfigError, EngineError, MemoryPlanError, ModelError, one_line
from engine.messages import Swap, SwapOutcome
from engine.model.fit import check_pair
from engine.model.kv_cache import KVCache, bytes_per_token
from engine.model.loaded import LoadedModel
from engine.model.memory import device_limit
from engine.model.pair import load_draft, refuse_weights, runner_of, use_device, warm_up
from engine.model.proof import failure
from engine.model.runner import ForeignRunner, ModelRunner
from engine.scheduling.memory import gib
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.speculation.allowance import Allowance
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.proposal import Proposer
from engine.step.profiling import profile_another

logger = logging.getLogger(__name__)

# Longest wait of a step for the interpreter while the thread holds it. With Python's default, each
# call in a step that releases the interpreter would cost 5 ms.
SWITCH_SECONDS = 0.0005
OWN_TOKENIZER = "has a tokenizer of its own: such a draft is configured, not swapped"
ROOM = "a draft is loaded beside the running one; leave room for it with cache.num_blocks"

# During a trial: its share of the time, least seconds between comparisons, least and most tokens
# to compare, and the longest text to read (in full steps of `max_step_tokens`).
_SHARE, _LEAST_SECONDS, _LEAST_TOKENS, _MOST_TOKENS, _LONGEST = 0.05, 0.05, 16, 128, 4

MakeRunner = Callable[[], tuple[ModelRunner, KVCache]]


@dataclass(slots=True)
class _Draft:
    """A draft model that is ready to propose, with its plane in `cache`."""

    path: str
    runner: ModelRunner
    cache: KVCache
    controller: KController


class DraftSwap:
    """Call `begin` at any time, and `advance` between steps while `is_due`. `next_outcome` returns
    each outcome once. `runner`: the configured draft model's, if any."""

    def __init__(
        self,
        config: EngineConfig,
        target: LoadedModel,
        main: Proposer,
        runner: ModelRunner | None,
        *,
        cache: KVCache,
        measured: Profile,
        modes: Modes,
        scheduler: Scheduler,
        allowance: Allowance,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._target, self._main = config, target, main
        self._cache, self._measured, self._modes = cache, measured, modes
        self._scheduler, self._allowance, self._clock = scheduler, allowance, clock
        self._running: _Draft | None = None
        proposer = config.speculation.proposer
        if runner is not None and isinstance(proposer, DraftModelConfig):
            self._running = _Draft(proposer.path, runner, cache, modes.configured)
        self._previous: _Draft | None = None  # while the running one is on trial
        self._path = ""  # of the draft that is being loaded
        self._loading: Future[MakeRunner] | None = None
        self._pieces: Iterator[None] | None = None  # pieces of a running `_install`
        self._longest_pause = 0.0  # seconds of the longest piece so far
        self._trial = DraftTrial(modes.configured, modes.configured)
        self._next_comparison = inf  # clock time of the next comparison
        self._seen: dict[int, int] = {}  # by sequence number: its length at the last comparison
        self._outcomes: list[Swap] = []

    @property
    def is_due(self) -> bool:
        if self._pieces is not None or (self._loading is not None and self._loading.done()):
            return True
        return self._previous is not None and self._clock() >= self._next_comparison

    def next_outcome(self) -> Swap | None:
        return self._outcomes.pop(0) if self._outcomes else None

    def begin(self, path: str) -> None:
        """Start loading a draft. Raises ConfigError while another one is being loaded."""
        if self._loading is not None or self._pieces is not None:
            raise ConfigError(f"the draft model {self._path!r} is being loaded")
        self._path, self._longest_pause = path, 0.0
        if reason := self._obstacle():
            self._report("refused", reason)
            return
        self._loading = future = Future[MakeRunner]()

        def run() -> None:
            try:
                future.set_result(self._read(path))
            except BaseException as error:  # a panic in Rust is not an Exception
                known = isinstance(error, Exception)
                future.set_exception(error if known else ModelError(failure(error)))

        sys.setswitchinterval(SWITCH_SECONDS)
        threading.Thread(target=run, name=LOADING, daemon=True).start()

    def advance(self) -> None:
        """Do one piece of the pending work."""
        began = self._clock()
        loading = self._loading
        if self._pieces is None and (loading is None or not loading.done()):
            self._compare()
            self._next_comparison = began + max((self._clock() - began) / _SHARE, _LEAST_SECONDS)
            return
        try:
            if self._pieces is None:
                assert loading is not None
                self._loading, self._modes.paused = None, True
                self._pieces = self._install(loading.result())
            if next(self._pieces, self) is self:
                self._pieces, self._modes.paused = None, False
        except EngineError as error:
            self._refuse(one_line(error, None))
        except Exception as error:
            logger.exception("the draft model %r could not be put in place", self._path)
            self._refuse(f"the draft model {self._path!r} fails: {failure(error)}")
        self._longest_pause = max(self._longest_pause, self._clock() - began)

    # -- a new one -------------------------------------------------------------------------------

    def _obstacle(self) -> str | None:
        """Return why no draft can be swapped here; None if one can."""
        config, running = self._config.speculation, self._running
        if running is None or not isinstance(self._main, DraftModelProposer):
            return f"the proposer is {config.proposer.kind!r}: only a draft model can be swapped"
        if isinstance(running.runner, ForeignRunner):
            return f"the running draft model {running.path!r} {OWN_TOKENIZER}"
        if config.trace is not None:
            return "speculation.trace is of one draft model: none is swapped while it is recorded"
        return None

    def _read(self, path: str) -> MakeRunner:
        """Load and check a draft, in the thread. Raises EngineError."""
        config, proposer = self._config, self._config.speculation.proposer
        assert isinstance(proposer, DraftModelConfig)
        if path != proposer.path:  # these settings are for the configured draft only
            changes = {"path": path, "revision": None, "trust_remote_code": False}
            proposer = proposer.model_copy(update=changes)
        use_device(self._target.device)
        for file in Path(path).glob("*"):  # opening a pipe would block the whole process
            if not (file.is_file() or file.is_dir()):
                raise ModelError(f"{file} is not a regular file")
        try:
            refuse_weights(config, {"draft": proposer})
        except MemoryPlanError as error:
            raise MemoryPlanError(f"{error}; {ROOM}") from error
        draft = load_draft(config, proposer)
        if check_pair(self._target, draft) is not None:
            raise ModelError(f"the draft model {path!r} {OWN_TOKENIZER}")
        if draft.device.type == "cuda":  # graphs cannot be captured while steps run
            return partial(self._make_runner, draft)
        placed = self._make_runner(draft)
        return lambda: placed

    def _make_runner(self, draft: LoadedModel) -> tuple[ModelRunner, KVCache]:
        """Return a runner over a new plane, or over the running draft's. Raises MemoryPlanError."""
        assert self._running is not None
        cache, running, role = self._cache.beside(), self._running.runner.model, draft.role
        dtype = self._cache.dtype or draft.dtype
        if (draft.layers, dtype) == (running.layers, self._cache.dtype or running.dtype):
            cache.planes[role] = self._running.cache.planes[role]
        else:
            size = cache.num_blocks * cache.block_size * bytes_per_token(draft.layers, dtype)
            limit, device = device_limit(self._config.cache, str(draft.device))
            if size > limit:
                raise MemoryPlanError(
                    f"keys and values of the draft model {draft.path!r} take {gib(size)}, but"
                    f" {gib(limit)} may be used on {device}; {ROOM}"
                )
        return runner_of(self._config, draft, cache, ready=False), cache

    def _install(self, make_runner: MakeRunner) -> Iterator[None]:
        """Switch to the new draft, one piece per `next`, between steps. Raises EngineError."""
        runner, cache = make_runner()
        yield
        yield from warm_up(self._config, runner, cache)
        measured, running = self._measured, self._running
        assert running is not None
        alike = cache.planes[runner.model.role] is running.cache.planes[runner.model.role]
        alike = alike and _size(runner) == _size(running.runner)
        if measured.draft and not alike:  # otherwise its step costs are known
            measured = yield from profile_another(self._config, runner, cache, measured)
        costs = running.controller.costs if alike else running.controller.costs.with_draft(measured)
        speculation = self._config.speculation
        controller = build_controller(speculation, stops=not runner.chains, costs=costs)
        self._trial, self._seen = DraftTrial(running.controller, controller), {}
        self._previous, self._next_comparison = running, self._clock()
        self._switch(_Draft(self._path, runner, cache, controller))
        self._report(
            "trial",
            f"the draft model {self._path!r} replaces {running.path!r} on trial; the swap delayed"
            f" no step by more than {self._longest_pause:.3f} s",
        )

    def _switch(self, draft: _Draft) -> None:
        assert isinstance(self._main, DraftModelProposer)
        role = draft.runner.model.role
        self._cache.planes[role] = draft.cache.planes[role]
        self._main.use(draft.runner)
        self._modes.replace(draft.controller)
        self._scheduler.forget_drafts()
        self._allowance.limit_catch_up(self._config.schedule.max_step_tokens)
        self._running = draft

    def _refuse(self, sentence: str) -> None:
        if self._pieces is not None and self._running is not None:  # its plane was written to
            self._switch(self._running)
        self._pieces, self._modes.paused = None, False
        self._report("refused", sentence)

    # -- its trial -------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Have both drafts read the sequence with the most new tokens, then decide. The running
        draft reads last, since its KV must stay."""
        new, previous, main = self._running, self._previous, self._main
        assert new is not None
        assert previous is not None
        assert isinstance(main, DraftModelProposer)
        running = self._scheduler.running
        seq = max(running, key=self._num_new_tokens, default=None)
        if seq is None or (count := self._num_new_tokens(seq)) < _LEAST_TOKENS:
            return
        self._seen[seq.number] = seq.num_tokens
        results = []
        for draft in (previous, new):
            main.use(draft.runner)
            results.append(main.in_hindsight(seq, min(count, _MOST_TOKENS)))
        if len(results[0]) != len(results[1]):  # one draft's sampler left a token undecided
            return
        self._trial.add(*results)
        verdict = self._trial.verdict(Load(len(running), self._scheduler.mean_length))
        if verdict is None:
            return
        self._previous = None
        if verdict.stays:
            self._report("kept", f"the draft model {new.path!r} is kept: {verdict.words}", new.path)
            return
        self._switch(previous)
        message = f"the draft model {new.path!r} was taken back for {previous.path!r}"
        self._report("taken_back", f"{message}: {verdict.words}", new.path)

    def _num_new_tokens(self, seq: Sequence) -> int:
        """Return the number of tokens generated since the last comparison; 0 if the text is too
        long to be read between two steps."""
        if seq.num_tokens > _LONGEST * self._config.schedule.max_step_tokens:
            return 0
        return seq.num_tokens - max(self._seen.get(seq.number, 0), seq.num_prompt)

    def _report(self, outcome: SwapOutcome, message: str, path: str = "") -> None:
        """Log and queue an outcome. `path`: the draft, if not the one being loaded."""
        level = logging.INFO if outcome in ("trial", "kept") else logging.WARNING
        logger.log(level, message)
        running = self._running.path if self._running is not None else ""
        self._outcomes.append(Swap(path or self._path, outcome, message, running))


def _size(runner: ModelRunner) -> tuple[int, bool]:
    """Return facts that drafts of equal KV shape must share to have equal step costs."""
    model = runner.model
    return sum(weight.nbytes for weight in model.model.parameters()), model.compiled is not None
