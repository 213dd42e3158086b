"""The server on Ray Serve (`pip install 'foredraft[ray]'`): replicas, each with its own engine and
GPU, behind an ingress.

    serve run server.replicas.ray_app:build config=foredraft.toml gpus=1 max_replicas=4

A replica runs the same app and supervisor as `foredraft serve`. The ingress (`ingress.py`) forwards
each request to one of them over Ray; Ray's proxies see only the ingress.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from ray import cluster_resources, serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import ASGIApp

from engine.config import BaseConfig, check_folders
from engine.errors import ConfigError, EngineError
from server.api.errors import ApiError
from server.app import create_app
from server.config import Config, explain, load_config
from server.engine.lifecycle import EngineState
from server.replicas.answer import answer
from server.replicas.ingress import Forwarded, Ingress, ReplicaLost, ResponsePart
from server.replicas.replica import Replica, set_up_logging
from server.replicas.scaling import ByTokens, Gauge
from server.supervise.supervisor import ENGINE_COMMAND

LOOK_BACK_SECONDS = 15.0  # window over loads, which replicas report every ten seconds
EXTRA_REQUESTS = 64  # beyond a replica's own limit: quick ones, and those that it refuses itself
INGRESS_REQUESTS = 10_000
REQUEST_ID = b"x-request-id"
ROUTER = "server.replicas.ray_router:AffinityRouter"
WAIT_SECONDS = 60.0  # the longest wait for a replica to accept a request


class RayOptions(BaseConfig):
    """The arguments of `serve run`, or `args` in a file for `serve deploy`. Numbers may be
    strings."""

    model_config = ConfigDict(strict=False)

    config: str | None = None
    set: Annotated[
        list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
    ] = []
    gpus: float | None = Field(None, ge=0)  # per replica; None: one if the cluster has any
    cpus: float = Field(1, ge=0)  # per replica; also the number of threads of a CPU engine
    min_replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1)  # None: no autoscaling
    ingresses: int = Field(1, ge=1)
    queue_seconds: float = Field(2.0, gt=0)  # of queued work beyond which replicas are added
    upscale_seconds: float = Field(30.0, ge=0)  # how long it must last; `downscale_seconds` too
    downscale_seconds: float = Field(600.0, ge=0)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"`max_replicas` must be at least `min_replicas`, {self.min_replicas}")
        return self


class Served:
    """One replica. Ray considers it started once its engine is ready."""

    async def __init__(self, config: Config, command: Sequence[str]) -> None:  # type: ignore[misc]
        set_up_logging(config.server.log_level, config.server.log_format)
        check_folders(config.engine)
        self._settled = asyncio.Event()
        self._replica = replica = Replica(config, command=command, on_state=self._on_state)
        self._gauge = Gauge()
        await replica.supervisor.start()
        try:
            self._services = replica.services(await replica.load())
            self._app: ASGIApp = create_app(self._services)
            replica.grammars.start()
            await self._settled.wait()
            await self.check_health()
        except BaseException:
            await self.__del__()
            raise
        self._telling = asyncio.create_task(replica.log_throughput())

    def _on_state(self, state: EngineState) -> None:
        if state in ("ready", "failed"):
            self._settled.set()

    async def answer(self, request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
        yield ResponsePart()  # the request is accepted
        async with aclosing(answer(self._app, request)) as parts:
            async for part in parts:
                yield part

    async def check_health(self) -> None:
        """Raise EngineError only if the engine failed for good: Ray then replaces the replica."""
        supervisor = self._replica.supervisor
        if supervisor.state in ("failed", "stopped"):
            raise EngineError(supervisor.failure or "the engine is stopped")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        metrics, admission = self._replica.metrics, self._services.admission
        waiting = metrics.total("requests_waiting")
        return asdict(
            self._gauge.read(
                metrics.pace(), waiting=waiting, prompt_tokens=admission.waiting_tokens
            )
        )

    async def metrics(self) -> tuple[str, bytes]:
        name = serve.get_replica_context().replica_id.unique_id
        waiting = self._services.admission.waiting_tokens
        return name, self._replica.metrics.render(waiting_tokens=waiting)

    async def __del__(self) -> None:
        """Stop. Ray calls it when running requests have ended or after `server.grace_seconds`."""
        await self._replica.supervisor.stop(0.0)
        await self._replica.grammars.close()


class Front:
    """One ingress."""

    def __init__(self, replicas: Any, config: Config) -> None:
        self._replicas = replicas
        self._config = config.server
        self._streams = replicas.options(method_name="answer", stream=True)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        config = self._config
        set_up_logging(config.log_level, config.log_format)
        return Ingress(
            self._ask,
            metrics=self._metrics,
            max_body_bytes=config.max_body_bytes,
            seconds=config.resume_seconds,
        )

    async def _ask(self, request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
        response, over = self._streams.remote(request), False
        try:
            async with asyncio.timeout(self._config.resume_seconds or WAIT_SECONDS):
                await anext(response)
            async for part in response:
                if part.start is not None:  # Ray's proxies add this header themselves
                    headers = part.start["headers"]
                    part.start["headers"] = [pair for pair in headers if pair[0] != REQUEST_ID]
                yield part
            over = True
        except (TimeoutError, DeploymentUnavailableError):
            message = "no replica takes requests; try again in a moment"
            raise ApiError(503, message, code="no_replica") from None
        except RayTaskError as error:
            raise ApiError(
                500, "an internal error; the replica's log has it", code="internal"
            ) from error
        except RayError as error:
            over = True
            raise ReplicaLost from error
        finally:
            if not over:
                response.cancel()

    async def _metrics(self) -> Mapping[str, bytes]:
        results = await self._replicas.broadcast("metrics").results_async(
            timeout_s=10, return_exceptions=True
        )
        return dict(result for result in results if not isinstance(result, BaseException))


def build(args: dict[str, Any]) -> Any:
    """Return the Serve application for the arguments (RayOptions). Raises ConfigError."""
    try:
        options = RayOptions.model_validate(args)
    except ValidationError as error:
        raise ConfigError(explain(error, RayOptions, args)) from None
    return application(load_config(options.config, options.set, os.environ), options)


def application(
    config: Config, options: RayOptions, *, command: Sequence[str] = ENGINE_COMMAND
) -> Any:
    """Return the Serve application: replicas behind ingresses. Raises ConfigError."""
    server = config.server
    if server.tls_certificate is not None:
        hint = "Ray's proxy has the TLS: say `ssl_certfile` and `ssl_keyfile` in its `http_options`"
        raise ConfigError(f"server.tls_certificate is not allowed: {hint}")
    gpus = options.gpus
    if gpus is None:
        gpus = float(config.engine.device != "cpu" and cluster_resources().get("GPU", 0) >= 1)
    replicas = serve.deployment(
        Served,
        name="Replica",
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": gpus},
        max_ongoing_requests=config.max_inflight + EXTRA_REQUESTS,
        graceful_shutdown_timeout_s=server.grace_seconds,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **_number(options),
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="Ingress",
        num_replicas=options.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=server.grace_seconds,
    )
    return front.bind(replicas.bind(config, command), config)


def _number(options: RayOptions) -> dict[str, Any]:
    """Return the deployment options for the number of replicas."""
    if options.max_replicas is None:
        return {"num_replicas": options.min_replicas}
    policy = AutoscalingPolicy(
        policy_function=f"{ByTokens.__module__}:{ByTokens.__name__}",
        policy_kwargs={"seconds": options.queue_seconds},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            look_back_period_s=LOOK_BACK_SECONDS,
            upscale_delay_s=options.upscale_seconds,
            downscale_delay_s=options.downscale_seconds,
            policy=policy,
        )
    }
