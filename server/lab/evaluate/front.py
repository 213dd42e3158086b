"""The server's own application and engine, asked in this process, without HTTP: bodies mean what
they mean there, and what the server would refuse is refused in its words."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.messages import Ready, SetSpeculation, StepMetrics
from server.app import create_app
from server.config import Config
from server.engine.client import EngineClient, EngineHandle
from server.engine.lifecycle import EngineState, RestartPolicy
from server.generation.structured import grammar_checker
from server.lab.evaluate.arms import Arm
from server.lab.evaluate.prompts import Prompt, PromptsError
from server.observe.metrics import Metrics
from server.supervise.supervisor import EngineSupervisor, SupervisorSettings
from server.text.tokenizer import Tokenizer

NOT_READY = 503


@dataclass(frozen=True, slots=True)
class Played:
    """Token ids by request, those of all its choices joined; seconds of all requests. By depth
    from 0: proposals that reached it, and those accepted there."""

    texts: list[list[int]]
    seconds: float
    proposed: Counter[int]
    accepted: Counter[int]

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included."""
        return sum(map(len, self.texts)) / self.seconds


class Front:
    """`client` and `clock` are parameters for tests."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        client: EngineHandle | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.client = client or EngineClient(on_metrics=self._observe)
        self._config = config
        self.clock = clock
        self._proposed, self._accepted = Counter[int](), Counter[int]()
        metrics = Metrics()
        self._grammars = grammar_checker(config, metrics.observe_grammar)
        self._app = create_app(
            config,
            tokenizer=tokenizer,
            client=self.client,
            metrics=metrics,
            grammars=self._grammars,
        )

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Ready]:
        """It runs inside. Raises EngineError when it cannot be started."""
        client, ready = self.client, asyncio.Event()
        assert isinstance(client, EngineClient)

        def on_state(state: EngineState) -> None:
            if state == "ready":
                ready.set()

        server = self._config.server
        settings = SupervisorSettings(
            watchdog=server.watchdog_seconds,
            start_timeout=server.start_timeout_seconds,
            restarts=RestartPolicy(max_restarts=0),
        )
        supervisor = EngineSupervisor(
            self._config.engine, client, settings=settings, on_state=on_state
        )
        gc.collect()
        gc.freeze()  # a collection that walks the tokenizer would be timed with the requests
        await supervisor.start()
        waits = [asyncio.create_task(event.wait()) for event in (ready, supervisor.failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.failed.is_set():
                raise EngineError(supervisor.failure or "the engine failed")
            assert client.ready is not None
            yield client.ready
        finally:
            for wait in waits:
                wait.cancel()
            await self._grammars.close()
            await supervisor.stop(0.0)

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """What a body shows by itself, before the engine is there. Raises PromptsError."""
        for prompt in prompts:
            if "speculation" in prompt.body:
                said = "`speculation` is what is evaluated here; leave it out"
                raise PromptsError(f"{prompt.where}: {said}")
            status, reply = await self._post(prompt.path, {**prompt.body, **self._model})
            if status not in (200, NOT_READY):
                raise PromptsError(f"{prompt.where}: {reply['error']['message']}")

    async def play(
        self, arm: Arm, prompts: Sequence[Prompt], *, at_once: int, tokens: int
    ) -> Played:
        """All prompts, the next as soon as one ends. Raises PromptsError for one that is refused,
        EngineError when the engine is lost."""
        self.client.set_speculation(SetSpeculation(arm.mode, arm.k))
        bodies = [
            {**prompt.limited(tokens), **self._model, "stream": False, "return_token_ids": True}
            for prompt in prompts
        ]
        if arm.proposers:
            bodies = [{**body, "speculation": {"proposers": arm.proposers}} for body in bodies]
        texts: list[list[int]] = [[] for _ in prompts]
        left = iter(range(len(prompts)))

        async def ask_in_turn() -> None:
            for i in left:
                texts[i] = await self._complete(prompts[i], bodies[i])

        self._proposed, self._accepted = Counter[int](), Counter[int]()
        began = self.clock()
        await asyncio.gather(*(ask_in_turn() for _ in range(at_once)))
        return Played(texts, self.clock() - began, self._proposed, self._accepted)

    async def _complete(self, prompt: Prompt, body: dict[str, Any]) -> list[int]:
        status, reply = await self._post(prompt.path, body)
        if status == 200:
            return [token for choice in reply["choices"] for token in choice["token_ids"]]
        message = reply["error"]["message"]
        raise EngineError(message) if status >= 500 else PromptsError(f"{prompt.where}: {message}")

    @property
    def _model(self) -> dict[str, str]:
        return {"model": self._config.model_name}

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON of the application's reply."""
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        scope = {
            "type": "http", "http_version": "1.1", "scheme": "http", "method": "POST",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "headers": headers, "client": None, "server": None,
        }  # fmt: skip
        requests = iter([{"type": "http.request", "body": data, "more_body": False}])
        replies: list[dict[str, Any]] = []

        async def receive() -> Any:
            for request in requests:
                return request
            await asyncio.Event().wait()  # the client stays

        async def send(message: Any) -> None:
            replies.append(message)

        await self._app(scope, receive, send)
        return replies[0]["status"], json.loads(b"".join(r.get("body", b"") for r in replies))

    def _observe(self, step: StepMetrics) -> None:
        self._proposed.update(dict(enumerate(step.proposed_at)))
        self._accepted.update(dict(enumerate(step.accepted_at)))
