"""Detects, on a CPU, calls that would make the host wait for a device."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Waits(TorchFunctionMode):
    """Records the names of torch calls that copy values to the host, in order."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
