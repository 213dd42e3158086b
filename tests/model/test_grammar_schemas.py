"""Three hundred schemas and a random model: every reply that completes is valid."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

from engine.core import Engine
from engine.grammar.check import verdict
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import Grammar, SamplingParams
from engine.model.pair import load_pair
from tests.model.test_lossless import Replies, config_for, run, submit_all
from tests.support import tiny, tiny_text
from tests.support.schemas import COUNT, REFUSED, schemas

PROMPT: list[int] = tiny_text.tokenizer().encode('{"name": ').ids


@pytest.mark.slow
def test_every_completed_reply_is_valid(tmp_path: Path) -> None:
    """Law: at T=1 a random model writes valid JSON or is cut off; most replies complete."""
    model = tiny_text.target()
    paths = [
        tiny_text.save(found, tmp_path / name)
        for name, found in (("target", model), ("draft", tiny.draft_of(model)))
    ]
    config = config_for(paths[0], paths[1], "draft_model", 3, {"cache": {"num_blocks": 4000}})
    engine = Engine(config, pair=load_pair(config))
    given = schemas()
    assert len(given) == COUNT
    submit_all(
        engine,
        PROMPT,
        {
            str(i): SamplingParams(
                seed=i, max_tokens=240, grammar=Grammar("json_schema", json.dumps(schema))
            )
            for i, schema in enumerate(given)
        },
    )
    replies = Replies(run(engine))
    ends = [replies.last[str(i)].finish for i in range(COUNT)]
    for i, schema in enumerate(given):
        assert ends[i] in ("stop", "length"), (schema, replies.last[str(i)].error)
        if ends[i] == "stop":
            text = tiny_text.tokenizer().decode(replies.tokens[str(i)], skip_special_tokens=True)
            validator = jsonschema.validators.validator_for(
                schema, default=jsonschema.Draft202012Validator
            )
            validator(schema).validate(json.loads(text))
    share = ends.count("stop") / COUNT
    sys.stdout.write(f"{share:.0%} of {COUNT} replies were completed\n")
    assert share >= 0.8


def test_what_is_not_enforced_is_refused(tmp_path: Path) -> None:
    """Law: no schema is partly applied. Each of these uses a feature that is not enforced, or
    cannot be satisfied."""
    path = tmp_path / "model"
    path.mkdir()
    tiny_text.tokenizer().save(str(path / "tokenizer.json"))
    vocabulary = load_vocabulary(str(path))
    for name, schema in REFUSED.items():
        assert verdict(Grammar("json_schema", json.dumps(schema)), vocabulary), name
