"""The server's own application and engine, asked in this process, without HTTP: bodies mean what
they mean there, and what the server would refuse is refused in its words."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.lab.comparison.figures import Reply, Run, StepSums
from engine.lab.comparison.workload import Arm, Lane, Request
from engine.messages import Ready, SetSpeculation
from server.api.services import Services
from server.app import create_app
from server.config import Config
from server.engine.client import EngineClient
from server.engine.lifecycle import EngineState, RestartPolicy
from server.generation.structured import grammar_checker
from server.lab.evaluate.prompts import Prompt
from server.lab.evaluate.settings import Setting
from server.observe.metrics import Metrics
from server.supervise.supervisor import EngineSupervisor, SupervisorSettings
from server.text.tokenizer import Tokenizer

NOT_READY = 503
Pieces = list[tuple[float, bytes]]  # of a body, and when they came


class Front:
    """race.Player: `prompt` of a request is the number of one of `prompts`; no reply is longer than
    `longest` tokens. `client` and `clock` are parameters for tests."""

    exact = False

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        prompts: Sequence[Prompt],
        settings: Mapping[Arm, Setting],
        longest: int,
        client: EngineClient | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config, self._prompts, self._settings = config, prompts, settings
        self._longest, self._clock = longest, clock
        self._steps = StepSums()
        self._loop = asyncio.get_running_loop()
        self._client = client or EngineClient(on_metrics=lambda step: self._steps.add(step))
        metrics = Metrics()
        self._grammars = grammar_checker(config, metrics.observe_grammar)
        services = Services(
            config=config,
            tokenizer=tokenizer,
            client=self._client,
            metrics=metrics,
            grammars=self._grammars,
        )
        self._app = create_app(services)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Ready]:
        """It runs inside. Raises EngineError when it cannot be started."""
        client, ready = self._client, asyncio.Event()

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
            self.exact = client.ready.exact
            yield client.ready
        finally:
            for wait in waits:
                wait.cancel()
            await self._grammars.close()
            await supervisor.stop(0.0)

    async def check(self, prompts: Sequence[Prompt], *, tokens: int | None = None) -> None:
        """Whether each would be served: with replies of so many tokens; without, what a body shows
        by itself, while there is no engine. Raises ConfigError."""
        for prompt in prompts:
            if "speculation" in prompt.body:
                said = "`speculation` is what is evaluated here; leave it out"
                raise ConfigError(f"{prompt.where}: {said}")
            body = prompt.body if tokens is None else prompt.limited(tokens)
            status, pieces = await self._send(prompt.path, body)
            if status not in (200, NOT_READY):
                await self._grammars.close()  # its child must not outlive the loop
                raise _refusal(prompt, status, pieces)

    def warm(self, prompts: Sequence[str]) -> None:
        """Nothing: prompts are part of what is measured, and no cache knows them."""

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, cold: bool = False
    ) -> dict[Arm, Run]:
        """For a thread beside the loop. Until every reply has ended, since texts end by themselves.
        Raises ConfigError for what is refused, EngineError when the engine is lost."""
        plays = ((arm, self._play(arm, lanes)) for arm in arms)
        return {
            arm: asyncio.run_coroutine_threadsafe(play, self._loop).result() for arm, play in plays
        }

    async def _play(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        self._client.set_speculation(SetSpeculation(arm.mode, arm.k))  # type: ignore[arg-type]
        run = Run()
        self._steps = run.steps
        began = self._clock()

        async def ask_in_turn(lane: int) -> None:
            for request in lanes[lane]:
                reply = Reply(lane, request.seed, self._clock() - began)
                run.replies.append(reply)
                await self._complete(arm, request, reply, began)

        await asyncio.gather(*map(ask_in_turn, range(len(lanes))))
        return run

    async def _complete(self, arm: Arm, request: Request, reply: Reply, began: float) -> None:
        """Fills in arrivals and text: the ids of all choices, one after the other."""
        prompt = self._prompts[int(request.prompt)]
        body = prompt.limited(min(request.tokens, self._longest)) | {"return_token_ids": True}
        body["stream"] = body.keys().isdisjoint({"best_of", "prompt_logprobs"})
        if proposers := self._settings[arm].proposers:
            body["speculation"] = {"proposers": proposers}
        status, pieces = await self._send(prompt.path, body)
        if status != 200:
            raise _refusal(prompt, status, pieces)
        texts: dict[int, list[int]] = {}
        for at, piece in pieces:
            for line in piece.splitlines():
                data = line.removeprefix(b"data: ")
                event = json.loads(data) if data.startswith(b"{") else {}
                if "error" in event:
                    raise EngineError(event["error"]["message"])
                for choice in event.get("choices", []):
                    ids = choice.get("token_ids") or []
                    texts.setdefault(choice["index"], []).extend(ids)
                    if ids:
                        reply.arrivals.append((at - began, len(ids)))
        if not reply.arrivals:  # the end of text right away, which is a token, too
            reply.arrivals.append((pieces[-1][0] - began, 1))
        reply.text = [token for index in sorted(texts) for token in texts[index]]

    async def _send(self, path: str, body: dict[str, Any]) -> tuple[int, Pieces]:
        """Status and body of the application's reply."""
        data = json.dumps(body | {"model": self._config.model_name}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        scope = {
            "type": "http", "http_version": "1.1", "scheme": "http", "method": "POST",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "headers": headers, "client": None, "server": None,
        }  # fmt: skip
        requests = iter([{"type": "http.request", "body": data, "more_body": False}])
        status, pieces = 0, Pieces()

        async def receive() -> Any:
            for request in requests:
                return request
            await asyncio.Event().wait()  # the client stays

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            pieces.append((self._clock(), message.get("body", b"")))

        await self._app(scope, receive, send)
        return status, pieces


def _refusal(prompt: Prompt, status: int, pieces: Pieces) -> EngineError:
    message = json.loads(b"".join(piece for _, piece in pieces))["error"]["message"]
    return EngineError(message) if status >= 500 else ConfigError(f"{prompt.where}: {message}")
