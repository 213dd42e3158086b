"""The OpenAPI document names every route and field and admits what the server admits, and no
request that it admits makes the server fail (schemathesis with a fixed choice of examples)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.api.field_table import ROWS
from tests.api.test_fields import BODIES, PATHS, good_body
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.serving import Served, description, serve

EXAMPLES = {"POST": 40, "GET": 5}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
POSTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/speculation",
)  # fmt: skip
GETS = (
    "/v1/models", "/v1/models/{name}", "/v1/capabilities", "/speculation", "/health",
    "/ready", "/metrics", "/version", "/openapi.json",
)  # fmt: skip
OPERATIONS = [("POST", path) for path in POSTS] + [("GET", path) for path in GETS]
SCHEMAS: dict[str, str] = {
    "completions": "CompletionRequest",
    "chat": "ChatRequest",
    "responses": "ResponsesRequest",
    "messages": "MessagesRequest",
    "tokenize": "TokenizeRequest",
    "detokenize": "DetokenizeRequest",
}
DOCUMENT = description()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tokenizer = ByteTokenizer(reads=("enable_thinking", "reasoning_effort"))
    with serve(FakeClient(tokens_per_step=8), tokenizer=tokenizer, allow_priority=True) as served:
        yield served


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
def test_every_route_is_in_it(served: Served) -> None:
    """Every route but the one that only says that nothing is stored."""
    app: Any = served.runner.config.app
    routes = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if "{rest" not in path and method != "head"
    }
    assert routes == set(OPERATIONS)
    given = httpx.get(f"{served.url}/openapi.json", timeout=60).json()
    described = {(m.upper(), path) for path, found in given["paths"].items() for m in found}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        pytest.param(name, endpoint, id=f"{endpoint}-{name}")
        for endpoint in BODIES
        for name, row in ROWS[PATHS[endpoint]].items()
        if row.kind != "refused"
    ],
)
def test_it_admits_what_the_server_admits(name: str, endpoint: str) -> None:
    """Every supported field is valid with the value that the tests of fields send, and as null."""
    request = request_of(endpoint)
    validator = jsonschema.Draft202012Validator(
        {**request, "components": DOCUMENT["components"]}  # resolves its references
    )
    validator.validate(good_body(name, endpoint))
    if name not in BODIES[endpoint]:
        validator.validate({**BODIES[endpoint], name: None})


def test_it_is_a_valid_description() -> None:
    """Every schema in it is valid."""
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def request_of(endpoint: str) -> dict[str, Any]:
    return dict(DOCUMENT["components"]["schemas"][SCHEMAS[endpoint]])


def operation(document: dict[str, Any], served: Served, method: str, path: str) -> Any:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=served.url)
    return schema[path][method]


def few(count: int) -> settings:
    """Return settings for `count` examples, the same in every run."""
    return settings(
        max_examples=count,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def answer(case: Any) -> int:
    """Return the status of a reply that conforms to the document. Whole floats are sent as
    integers, as clients do: JSON Schema counts 1.0 as an integer."""
    case.body = without_points(case.body)
    return int(case.call_and_validate(checks=CHECKS).status_code)


def without_points(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [without_points(item) for item in value]
        case dict():
            return {name: without_points(item) for name, item in value.items()}
        case _:
            return value


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_that_it_admits_makes_the_server_fail(
    served: Served, method: str, path: str
) -> None:
    """No 5xx, and no status, content type or body that the document does not describe."""

    @few(EXAMPLES[method])
    @given(case=operation(DOCUMENT, served, method, path).as_strategy())
    def send(case: Any) -> None:
        answer(case)

    send()
    assert served.client.inflight == 0


@pytest.mark.parametrize("endpoint", BODIES)
def test_one_field_at_a_time(served: Served, endpoint: str) -> None:
    """Of many random fields, two always conflict. One field in a valid request shows what it does
    alone, and most of its values are served."""
    answers: Counter[int] = Counter()
    for name, field in request_of(endpoint)["properties"].items():
        fixed = {**good_body(name, endpoint)}
        fixed.pop(name, None)
        body = {**{other: {"enum": [value]} for other, value in fixed.items()}, name: field}
        request = {"type": "object", "properties": body, "additionalProperties": False}
        request["required"] = list(body)
        schemas = {**DOCUMENT["components"]["schemas"], SCHEMAS[endpoint]: request}
        alone = {**DOCUMENT, "components": {"schemas": schemas}}

        @few(3)
        @given(case=operation(alone, served, "POST", PATHS[endpoint]).as_strategy())
        def send(case: Any) -> None:
            answers[answer(case)] += 1

        send()
    assert answers[200] > answers[400]
    assert set(answers) == {200, 400}
    assert served.client.inflight == 0
