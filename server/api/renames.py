"""Renames: errors of the endpoint that does the work, told in the words of the one that was asked.

/v1/responses runs on chat's request. What is wrong with `messages[2].content` there is wrong with
`input[1].content` here, in `param` and in the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from server.api.errors import ApiError, ContextLengthExceeded, as_api_error
from server.errors import ChatTemplateError, GenerationFailed, GrammarRefused

QUOTED = re.compile(r"`([a-z_]+[\w.\[\]]*)`")


class Renames:
    """`paths`: from a path of the inner request to the outer one's; what lies below goes along,
    the longest path that fits decides. `too_long`: paths that only a full context is told of."""

    def __init__(self, paths: Mapping[str, str], too_long: Mapping[str, str] | None = None) -> None:
        self._paths = sorted(paths.items(), key=lambda pair: -len(pair[0]))
        self._too_long = too_long or {}

    def path(self, inner: str) -> str:
        for old, new in self._paths:
            if inner == old or inner.startswith((f"{old}.", f"{old}[")):
                return new + inner[len(old) :]
        return inner

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Errors of callers leave renamed; all others as they are."""
        try:
            yield
        except GenerationFailed as error:
            if error.param is not None:
                error.param = self.path(error.param)
            raise
        except ContextLengthExceeded as error:
            full = Renames({**dict(self._paths), **self._too_long})
            raise full._renamed(as_api_error(error)) from None
        except (ApiError, ChatTemplateError, GrammarRefused) as error:
            raise self._renamed(as_api_error(error)) from None

    def _renamed(self, error: ApiError) -> ApiError:
        message = QUOTED.sub(lambda found: f"`{self.path(found[1])}`", error.message)
        param = None if error.param is None else self.path(error.param)
        return ApiError(error.status, message, param=param, code=error.code)
