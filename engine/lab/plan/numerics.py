"""Numerics: how many bytes a number takes, and which arithmetic multiplies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["bf16", "fp8", "int4"]

INT4_GROUP = 128  # weights that share one 16-bit scale


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a weight inside the layers. Embeddings and the output head stay in 16 bits, as in
    published quantised checkpoints."""

    name: PrecisionName
    weight_bytes: float
    table_bytes: float = 2.0


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision("bf16", 2.0),
    "fp8": Precision("fp8", 1.0),
    "int4": Precision("int4", 0.5 + 2 / INT4_GROUP),
}

KV_BYTES: dict[str, float] = {"bf16": 2.0, "fp8": 1.0}
