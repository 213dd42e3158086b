"""One model under several names: each is listed, can be looked up, and is echoed in replies."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.support.fake_client import FakeClient
from tests.support.serving import serve

NAMES = ["big", "org/big-7b", "gpt-4o"]


@pytest.fixture(scope="module")
def sdk() -> Iterator[OpenAI]:
    with (
        serve(FakeClient(), served_model_name=NAMES) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


def test_every_name_is_listed(sdk: OpenAI) -> None:
    """The order is the configuration's, and `root` is the first name."""
    models = list(sdk.models.list())
    assert [model.id for model in models] == NAMES
    assert {model.to_dict()["root"] for model in models} == {"big"}
    assert {model.to_dict()["max_model_len"] for model in models} == {512}


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_names_the_model_as_asked(sdk: OpenAI, name: str) -> None:
    """Clients compare the names; the text does not depend on them."""
    assert sdk.models.retrieve(name).id == name
    reply = sdk.completions.create(model=name, prompt="a", max_tokens=3, seed=1)
    assert reply.model == name
    assert reply.choices[0].text == (
        sdk.completions.create(model="big", prompt="a", max_tokens=3, seed=1).choices[0].text
    )
    chunks = sdk.completions.create(model=name, prompt="a", max_tokens=3, stream=True)
    assert {chunk.model for chunk in chunks} == {name}


def test_another_name_is_a_404_that_lists_them(sdk: OpenAI) -> None:
    """This holds on every route that takes a name."""
    for ask in (
        lambda: sdk.models.retrieve("small"),
        lambda: sdk.completions.create(model="small", prompt="a"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert refused.value.code == "model_not_found"
        assert refused.value.param == "model"
        assert all(f"`{name}`" in refused.value.message for name in NAMES)
