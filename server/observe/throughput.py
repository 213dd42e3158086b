"""ThroughputLog: one log line every ten seconds while anything runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.logs import log_fields
from server.observe.metrics import Metrics

logger = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
_SUMS = (
    "generation_tokens_total", "prefill_tokens_total", "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
)  # fmt: skip


class ThroughputLog:
    """Logs rates since the last `log`, and the gauges."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._at = clock()
        self._before = [0.0] * len(_SUMS)

    def log(self) -> None:
        """Log one line, unless nothing ran. `k`: mean draft tokens verified per sequence and step;
        `acceptance`: their accepted fraction."""
        now, sums = self._clock(), [self._metrics.total(name) for name in _SUMS]
        seconds = max(now - self._at, 1e-9)
        grown = [after - before for after, before in zip(sums, self._before, strict=True)]
        self._at, self._before = now, sums
        running, waiting, usage = map(
            self._metrics.total, ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        )
        if not any(grown) and not running and not waiting:
            return
        generated, prefilled, rounds, proposed, accepted = grown
        fields = {
            "tokens_per_second": round(generated / seconds, 1),
            "prompt_tokens_per_second": round(prefilled / seconds, 1),
            "running": int(running),
            "waiting": int(waiting),
            "k": round(proposed / rounds, 2) if rounds else None,
            "acceptance": round(accepted / proposed, 3) if proposed else None,
            "kv_cache_usage": round(usage, 3),
        }
        log_fields(logger, logging.INFO, "throughput", fields)
