"""Ray deployments of scripted servers, and routers that measure their own time. Needs Ray."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter

from server.replicas.ray_router import AffinityRouter
from tests.process.served import ROOT, SCRIPTED
from tests.support.scripted import Script


class ScriptedReplica:
    """`foredraft serve` in a child process. `folder`: where it saves its /metrics when it ends."""

    def __init__(self, folder: str, script: Script) -> None:
        self._process = subprocess.Popen(
            SCRIPTED, cwd=ROOT, env=script.environment(), stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        start_banner = self._process.stdout.readline().decode()
        self._url = start_banner.split(" at ")[1].removesuffix("/v1\n")
        self._last_words = Path(folder) / f"{self._process.pid}"
        self._http = httpx.AsyncClient(base_url=self._url, timeout=60)

    async def answer(self, body: bytes) -> AsyncGenerator[str, None]:
        async with self._http.stream("POST", "/v1/completions", content=body) as response:
            async for line in response.aiter_lines():
                if line:
                    yield line

    def __del__(self) -> None:
        self._last_words.write_text(httpx.get(f"{self._url}/metrics").text)
        self._process.terminate()
        self._process.wait()


class Timed:
    """Records how long each choice of a replica takes, in this process."""

    seconds: list[float] = []

    async def _choose_replica_for_request(self, *request: Any, **how: Any) -> Any:
        began = time.perf_counter()
        try:
            return await super()._choose_replica_for_request(*request, **how)  # type: ignore[misc]
        finally:
            self.seconds.append(time.perf_counter() - began)


class TimedAffinity(Timed, AffinityRouter):
    pass


class TimedTwoChoices(Timed, PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray's default router, timed."""
