"""Replica: everything that serves one engine, except HTTP. `server.serve` runs it behind a port,
`replicas.ray_app` as a deployment of Ray Serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from engine.config import model_folder
from engine.logs import LogFormat, configure_logging
from engine.messages import Starting, StepMetrics
from server.api.services import Services
from server.config import Config
from server.engine.client import EngineClient
from server.engine.lifecycle import EngineState
from server.generation.structured import GrammarChecker
from server.keys import Keyring
from server.observe.metrics import Metrics
from server.observe.speculation import SpeculationLog
from server.observe.throughput import EVERY_SECONDS, ThroughputLog
from server.observe.tracing import make_traces
from server.supervise.supervisor import ENGINE_COMMAND, EngineSupervisor
from server.text.tokenizer import Tokenizer, forget_torch, load_tokenizer

logger = logging.getLogger(__name__)

# Python's thread switch interval. With the default of 5 ms, tokenizing a prompt in a thread takes
# longer than everything else before its first token as soon as other requests stream.
SWITCH_SECONDS = 0.0005


class Replica:
    """The owner starts and stops the supervisor and the grammars. Must be created in the event loop
    that it runs in. Raises ConfigError."""

    def __init__(
        self,
        config: Config,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        on_state: Callable[[EngineState], None],
        on_starting: Callable[[Starting], None] = lambda starting: None,
    ) -> None:
        self.config = config
        self._on_state = on_state
        name = config.model_names[0]
        self.metrics = Metrics(
            model_name=name,
            engine=lambda: self.supervisor.pid,
            router_names=config.server.router_names,
        )
        self._on_end = make_traces(config.server.otlp_endpoint, os.environ, model=name)
        self._throughput = ThroughputLog(self.metrics, time.monotonic)
        self._speculation_log = SpeculationLog(time.monotonic)
        self.keyring = Keyring(config.server)
        self.grammars = GrammarChecker(config, self.metrics.observe_grammar)
        self.client = EngineClient(
            on_metrics=self._on_metrics,
            resume_seconds=config.server.resume_seconds,
            on_held=self.metrics.observe_held,
        )
        self.supervisor = EngineSupervisor(
            config, self.client, command=command, on_state=self._on_engine, on_starting=on_starting
        )

    def services(self, tokenizer: Tokenizer) -> Services:
        return Services(
            config=self.config,
            tokenizer=tokenizer,
            client=self.client,
            metrics=self.metrics,
            grammars=self.grammars,
            on_end=self._on_end,
            keyring=self.keyring,
        )

    def load(self) -> asyncio.Future[Tokenizer]:
        """Load the tokenizer in a daemon thread, so that a download cannot delay the exit."""
        loaded = Future[Tokenizer]()
        loaded.set_running_or_notify_cancel()  # so that cancelling the waiter cannot cancel it

        def run() -> None:
            try:
                loaded.set_result(load_for(self.config))
            except Exception as error:
                loaded.set_exception(error)

        threading.Thread(target=run, name="tokenizer", daemon=True).start()
        return asyncio.wrap_future(loaded)

    async def log_throughput(self) -> None:
        """Log the throughput every EVERY_SECONDS, for ever."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            self._throughput.log()

    def _on_engine(self, state: EngineState) -> None:
        self.metrics.set_engine_state(state)
        self._on_state(state)

    def _on_metrics(self, metrics: StepMetrics) -> None:
        self.metrics.observe_step(metrics)
        self._speculation_log.observe(metrics.estimates)


def load_for(config: Config) -> Tokenizer:
    """Load the tokenizer, for a process that only serves. Raises ModelError."""
    sys.setswitchinterval(SWITCH_SECONDS)
    target = config.engine.target
    if not target.trust_remote_code:  # remote code may need torch
        forget_torch()
    tokenizer = load_tokenizer(
        model_folder(target.path, "target"),
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )
    if (fault := tokenizer.template_fault()) is not None:
        logger.warning("requests to chat will be refused: %s", fault)
    # Exclude library objects from garbage collection: visiting them would delay all streams.
    gc.collect()
    gc.freeze()
    return tokenizer


def set_up_logging(level: str, form: LogFormat) -> None:
    """Configure logging. Libraries log only warnings and errors, except at level debug."""
    configure_logging(level, form)
    if level != "debug":
        for library in ("uvicorn", "httpx", "transformers", "asyncio"):
            logging.getLogger(library).setLevel(logging.WARNING)
