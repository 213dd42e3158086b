"""What would make the host wait for a device, seen on a CPU."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Waits(TorchFunctionMode):
    """Counts the calls of torch that bring numbers to the host, by name, in order."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
