"""Routes with a body, declared as FastAPI has it and read as strictly as this server reads.

An endpoint says `request: ChatRequest`, and FastAPI describes it. The body is read by `body`
(bounds, duplicate keys) and by the class itself (`RequestBody.read`, whose errors name the field),
which FastAPI's own reader knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import request_response

from server.api import replies
from server.api.body import read_body
from server.api.request import RequestBody, parse
from server.api.services import Services

EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}  # each; `data` is JSON, or the word [DONE]
Responses = dict[int | str, dict[str, Any]]
STREAMED: Responses = {
    200: {
        "description": "the whole reply, or a stream",
        "content": {"text/event-stream": {"schema": EVENT}},
    }
}


def refusals(told: dict[int, str]) -> Responses:
    return {status: {"model": replies.Error, "description": said} for status, said in told.items()}


REFUSALS = refusals(
    {
        400: "the request is wrong; `param` is the path of the field",
        404: "there is no such model",
        408: "the body came too slowly",
        413: "the body is too large",
        415: "the body is compressed",
        429: "too many sequences are in flight; try again after Retry-After seconds",
        500: "the engine or the server failed",
        503: "the engine takes no requests; try again after Retry-After seconds",
    }
)


class BodyRouter(APIRouter):
    """Its endpoints take `http: Request`, and those with a body a subclass of RequestBody."""

    def __init__(self, services: Services) -> None:
        limit = services.config.server.max_body_bytes

        class BodyRoute(APIRoute):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                if self.body_field is not None:  # no dependencies, so no exit stacks around it
                    self.app = request_response(self.get_route_handler())

            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                if self.body_field is None:
                    return super().get_route_handler()
                endpoint, name = self.endpoint, self.body_field.name
                annotation: Any = self.body_field.field_info.annotation
                kind: type[RequestBody] = annotation

                async def handle(http: Request) -> Response:
                    request = parse(await read_body(http, limit), kind)
                    response: Response = await endpoint(http=http, **{name: request})
                    return response

                return handle

        super().__init__(route_class=BodyRoute)
