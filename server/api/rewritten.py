"""Rewritten: a request of another API that is turned into a chat request.

Fields that chat has under the same name are passed on unchanged; the API's own class converts the
others. Errors of the chat request are reported with the field names of that API.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

from server.api.errors import ApiError, as_api_error
from server.api.intake import check_settings
from server.api.prompts import chat_ids
from server.api.schema import ChatRequest, Generating
from server.api.services import Services
from server.errors import ChatTemplateError, GenerationFailed, GrammarRefused

QUOTED = re.compile(r"`([a-z_]+[\w.\[\]]*)`")
MESSAGE = re.compile(r"messages\[(\d+)\](?:(\.tool_call_id)|\.tool_calls$)?")


class Rewritten(Generating, ABC):
    CHAT: ClassVar[type[ChatRequest]] = ChatRequest
    NAMES: ClassVar[Sequence[tuple[re.Pattern[str], str]]]  # chat's to this API's
    CALL_ID: ClassVar[str]  # this API's name for a message's `tool_call_id`
    CONVERSATION: ClassVar[str]  # this API's name for `messages`
    LEAD: ClassVar[str]  # the field that becomes a system message before them

    @property
    @abstractmethod
    def as_messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return chat's messages, and the path of each in this request."""

    @property
    @abstractmethod
    def as_chat(self) -> dict[str, Any]:
        """Return chat's fields that have other names or forms here; null means absent."""

    @cached_property
    def sent(self) -> dict[str, Any]:
        """Return the fields as the client wrote them."""
        return self.model_dump(exclude_unset=True, by_alias=True)

    @cached_property
    def chat(self) -> ChatRequest:
        """Return the chat request. Raises ApiError with chat's field names (see `renamed`)."""
        shared = self.sent.keys() & self.CHAT.model_fields.keys()
        own = {**self.as_chat, "model": self.model, "messages": self.as_messages[0]}
        return self.CHAT.read({name: self.sent[name] for name in shared} | own)

    async def num_tokens(self, services: Services) -> int:
        """Return the number of tokens in the prompt."""
        with self.renamed():
            ready = services.known(self.model)
            with services.admission.reserve(1):
                check_settings(services, self.chat)
                return len(await chat_ids(services, self.chat, ready))

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Rewrite field names in request errors to this endpoint's; other errors pass unchanged."""
        try:
            yield
        except GenerationFailed as error:
            if error.param is not None:
                error.param = self.name(error.param)
            raise
        except (ApiError, ChatTemplateError, GrammarRefused) as error:
            known = as_api_error(error)
            message = QUOTED.sub(lambda found: f"`{self.name(found[1])}`", known.message)
            param = None if known.param is None else self.name(known.param)
            if known.code == "context_length_exceeded" and param == self.CONVERSATION:
                param = self.LEAD if self._is_mostly_lead else param
                message = message.replace(f"`{self.CONVERSATION}`", f"`{param}`")
            raise ApiError(known.status, message, param=param, code=known.code) from None

    def name(self, path: str) -> str:
        """Return this API's name of a field of the chat request."""
        if found := MESSAGE.match(path):
            place = self.as_messages[1][int(found[1])]
            return place + (f".{self.CALL_ID}" if found[2] else path[found.end() :])
        for name, here in self.NAMES:
            if name.match(path):
                return name.sub(here, path, count=1)
        return path

    @property
    def _is_mostly_lead(self) -> bool:
        """Whether the system message before the conversation is longer than all the rest."""
        texts = [message.text for message in self.chat.messages]
        return self.LEAD in self.sent and len(texts[0]) > sum(map(len, texts[1:]))
