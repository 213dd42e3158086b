"""A request router for Ray Serve that chooses replicas by prefix affinity (`affinity.py`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.replicas.affinity import BOUND, HEADS, Affinity, read_key


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Any, without Ray
    """Configure it for the deployment that is called; the arguments are optional:

        @serve.deployment(request_router_config=RequestRouterConfig(
            request_router_class="server.replicas.ray_router:AffinityRouter",
            request_router_kwargs={"bound": 1.25, "heads": 16_384},
        ))

    It reads the prompt from the first argument of the call that is an HTTP request body (bytes) or
    has one as `body`; a call without one goes to the least loaded replica. So the caller must have
    read the body, as `ingress.py` does; Ray's proxies do not.

    Every process with a handle has its own router, which counts only its own calls: tokens to
    compute, from the choice until the call ends in any way. Only calls by `handle.remote` count;
    Ray does not report the end of `handle.choose_replica` without a dispatch. A handle keeps its
    first router: to change it, use another application name or restart the caller.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._affinity = Affinity()
        self._sent: dict[str, tuple[str, int]] = {}  # by call id: replica, tokens
        self._loads = Counter[str]()

    def initialize_state(self, *, bound: float = BOUND, heads: int = HEADS) -> None:
        """Set the options. Ray calls this with `request_router_kwargs`."""
        self._affinity = Affinity(bound=bound, heads=heads)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return all candidates, best first; those without room for a call come last. The call
        counts for the best at once, so that concurrent calls see it."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray retries in a busy loop
        id = pending_request.metadata.internal_request_id
        self._end(id)  # an earlier try
        key = read_key(_body(pending_request))
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = self._affinity.order(key, {name: self._loads[name] for name in replicas})
        free = self.select_available_replicas(candidate_replicas)
        order.sort(key=lambda name: replicas[name] not in free)
        self._count(id, order[0], self._affinity.send(key, order[0]))
        return [[replicas[name]] for name in order]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, **how: Any
    ) -> RunningReplica:
        """Correct the count: Ray may choose another than the best, and the caller may cancel."""
        id = pending_request.metadata.internal_request_id
        try:
            replica = await super()._choose_replica_for_request(pending_request, **how)
        except BaseException:
            self._end(id)
            raise
        name = replica.replica_id.unique_id
        if self._sent.get(id, ("", 0))[0] != name:
            self._end(id)
            self._count(id, name, self._affinity.send(read_key(_body(pending_request)), name))
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Also called for a replica that refused a call that now counts for another one."""
        if self._sent.get(internal_request_id, ("", 0))[0] == replica_id.unique_id:
            self._end(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._affinity.keep({replica.replica_id.unique_id for replica in replicas})

    def _count(self, id: str, name: str, tokens: int) -> None:
        self._sent[id] = name, tokens
        self._loads[name] += tokens

    def _end(self, id: str) -> None:
        if id in self._sent:
            name, tokens = self._sent.pop(id)
            self._loads[name] -= tokens
            if self._loads[name] <= 0:
                del self._loads[name]


def _body(request: PendingRequest) -> bytes:
    for argument in (*request.args, *request.kwargs.values()):
        body = getattr(argument, "body", argument)
        if isinstance(body, bytes):
            return body
    return b""
