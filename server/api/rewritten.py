"""Rewritten: a request of another API that is a chat in other words.

Fields that mean the same for chat are handed on as they are; the others are written as chat has
them by the API's own class. What chat then refuses is reported with the names of that API.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

from server.api.errors import ApiError, as_api_error
from server.api.schema import ChatRequest, Generating
from server.errors import ChatTemplateError, GenerationFailed, GrammarRefused

QUOTED = re.compile(r"`([a-z_]+[\w.\[\]]*)`")
MESSAGE = re.compile(r"messages\[(\d+)\](?:(\.tool_call_id)|\.tool_calls$)?")


class Rewritten(Generating, ABC):
    CHAT: ClassVar[type[ChatRequest]] = ChatRequest
    NAMES: ClassVar[Sequence[tuple[re.Pattern[str], str]]]  # of chat's fields here
    CALL_ID: ClassVar[str]  # `tool_call_id` of a message
    CONVERSATION: ClassVar[str]  # `messages`
    LEAD: ClassVar[str]  # what becomes a system message before them

    @property
    @abstractmethod
    def as_messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Chat's messages, and where each stands here."""

    @property
    @abstractmethod
    def as_chat(self) -> dict[str, Any]:
        """Chat's fields that go by other names or shapes here; nulls mean nothing."""

    @cached_property
    def sent(self) -> dict[str, Any]:
        """The fields as the client wrote them."""
        return self.model_dump(exclude_unset=True, by_alias=True)

    @cached_property
    def chat(self) -> ChatRequest:
        """The request that does the work. Raises ApiError with the names of chat (`renamed`)."""
        shared = self.sent.keys() & self.CHAT.model_fields.keys()
        own = {**self.as_chat, "model": self.model, "messages": self.as_messages[0]}
        return self.CHAT.read({name: self.sent[name] for name in shared} | own)

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Callers' errors leave with this endpoint's names; all others as they are."""
        try:
            yield
        except GenerationFailed as error:
            if error.param is not None:
                error.param = self._name(error.param)
            raise
        except (ApiError, ChatTemplateError, GrammarRefused) as error:
            known = as_api_error(error)
            message = QUOTED.sub(lambda found: f"`{self._name(found[1])}`", known.message)
            param = None if known.param is None else self._name(known.param)
            if known.code == "context_length_exceeded" and param == self.CONVERSATION:
                param = self.LEAD if self._is_mostly_lead else param
                message = message.replace(f"`{self.CONVERSATION}`", f"`{param}`")
            raise ApiError(known.status, message, param=param, code=known.code) from None

    def _name(self, path: str) -> str:
        """Of a field of the chat request."""
        if found := MESSAGE.match(path):
            place = self.as_messages[1][int(found[1])]
            return place + (f".{self.CALL_ID}" if found[2] else path[found.end() :])
        for name, here in self.NAMES:
            if name.match(path):
                return name.sub(here, path, count=1)
        return path

    @property
    def _is_mostly_lead(self) -> bool:
        """Whether what stands before the conversation is longer than all of it."""
        texts = [message.text for message in self.chat.messages]
        return self.LEAD in self.sent and len(texts[0]) > sum(map(len, texts[1:]))
