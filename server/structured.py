"""The way in for grammars: whoever constrains text asks here first, in a process of its own.

`Grammars.check` is the one entry point for response_format, structured_outputs and tools.
"""

from __future__ import annotations

from typing import Protocol

from engine.messages import Grammar


class Grammars(Protocol):
    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Returns when the engine can honour `grammar`. Raises ApiError (400, naming `param`) when
        it is malformed, too large, too slow to compile, or asks for what is not enforced."""
        ...
