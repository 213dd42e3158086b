"""Grammars under speculation: the same text as one token at a time with a fresh matcher for each.

Every engine below runs all grammars at once with all kinds of sampling fields, and plain requests
among them; each reply must equal the reference's token for token."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from engine.core import Engine
from engine.messages import Grammar, SamplingParams, Speculation
from engine.model.early_exit import early_exit
from engine.model.pair import Pair, load_pair
from server.generation.usage import Usage
from server.text.markers import Marker
from server.text.reasoning import STYLES, Thinking
from server.text.tool_format import ANY_OBJECT, FORMS, NO_ARGUMENTS, ToolFormat, call_grammar
from tests.model.test_lossless import Replies, config_for, run, submit_all, with_heads
from tests.support import tiny, tiny_text, two_tokenizers
from tests.support.drafters import Liar, Oracle, TreeOracle
from tests.support.reference_grammar import GrammarReference

LENGTH = 24
VOCAB = tiny_text.vocab_size()
PROMPT: list[int] = tiny_text.tokenizer().encode('{"name": "ab", "true": [12, "name').ids

SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[ab12]*$", "maxLength": 6},
                "true": {"type": "boolean"},
                "list": {"type": "array", "items": {"enum": ["ab", "name", 12]}, "maxItems": 3},
            },
            "required": ["name", "true"],
            "additionalProperties": False,
        }
    ),
)
TREE = Grammar(
    "json_schema",
    '{"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"a": {"$ref":'
    ' "#/$defs/n"}, "b": {"anyOf": [{"type": "null"}, {"type": "integer"}]}}, "required": ["b"],'
    ' "additionalProperties": false}}}',
)
ANY = Grammar("json_object")
REGEX = Grammar("regex", "[ab]{3,9}(name|true|[0-9]+)*")
CHOICE = Grammar("choice", '["ab", "abab", "name", "nature", "12"]')
LARK = Grammar("lark", 'start: <tool_call> sum "!"\nsum: /[0-9]{1,2}/ | sum "+" sum | "(" sum ")"')

CALLS = ToolFormat(
    next(form for form in FORMS if form.name == "hermes"),
    (Marker("<tool_call>", 2, True), Marker("</tool_call>", None, False)),
    '{"name": "', '", "arguments": ', "}",
)  # fmt: skip
FUNCTIONS = [("ab", json.loads(SCHEMA.source)), ("na", NO_ARGUMENTS), ("me", ANY_OBJECT)]
# Thinking that ends with a token that these models sample often enough.
MARKERS = (Marker("<think>", None, False), Marker("<tool_call>", 2, True))
THINKING = Thinking(STYLES["think"], MARKERS)
INSIDE = msgspec.structs.replace(SCHEMA, lead=replace(THINKING, inside=True).lead(to_content=True))
MAY = msgspec.structs.replace(REGEX, lead=THINKING.lead(to_content=True))
REQUIRED = call_grammar(CALLS, FUNCTIONS, required=True, many=True)
ALLOWED = call_grammar(CALLS, FUNCTIONS, required=False, many=True)

FIELDS: dict[str, SamplingParams] = {
    "schema": SamplingParams(seed=1, max_tokens=LENGTH, grammar=SCHEMA, logprobs=2),
    "schema greedy": SamplingParams(seed=2, max_tokens=LENGTH, grammar=SCHEMA, temperature=0),
    "recursive": SamplingParams(seed=3, max_tokens=LENGTH, grammar=TREE, temperature=0.7),
    "object": SamplingParams(seed=4, max_tokens=LENGTH, grammar=ANY),
    "object hot": SamplingParams(seed=5, max_tokens=LENGTH, grammar=ANY, temperature=1.6),
    "regex": SamplingParams(seed=6, max_tokens=LENGTH, grammar=REGEX),
    "regex on and on": SamplingParams(seed=7, max_tokens=LENGTH, grammar=REGEX, ignore_eos=True),
    "regex for long": SamplingParams(seed=8, max_tokens=LENGTH, grammar=REGEX, min_tokens=12),
    "choice": SamplingParams(seed=9, max_tokens=LENGTH, grammar=CHOICE),
    "choice of the complete": SamplingParams(
        seed=10, max_tokens=LENGTH, grammar=CHOICE, ignore_eos=True, min_tokens=5
    ),
    "lark": SamplingParams(seed=11, max_tokens=LENGTH, grammar=LARK),
    "lark penalised": SamplingParams(
        seed=12, max_tokens=LENGTH, grammar=LARK, repetition_penalty=1.4, presence_penalty=0.6,
        frequency_penalty=0.3,
    ),
    "filtered": SamplingParams(
        seed=13, max_tokens=LENGTH, grammar=SCHEMA, top_k=5, top_p=0.9, min_p=0.05
    ),
    "biased": SamplingParams(
        seed=14, max_tokens=LENGTH, grammar=ANY, logit_bias={5: 9.0, 30: -50.0}
    ),
    "stopped": SamplingParams(
        seed=15, max_tokens=LENGTH, grammar=ANY, stop_token_ids=tuple(range(3, 60))
    ),
    "calls": SamplingParams(seed=19, max_tokens=LENGTH, grammar=REQUIRED),
    "calls if it likes": SamplingParams(
        seed=27, max_tokens=LENGTH, grammar=ALLOWED, logit_bias={2: 2.0}
    ),
    "behind thinking": SamplingParams(
        seed=20, max_tokens=2 * LENGTH, grammar=INSIDE, logit_bias={2: 3.0}
    ),
    "perhaps behind thinking": SamplingParams(seed=21, max_tokens=LENGTH, grammar=MAY),
    "short": SamplingParams(seed=16, max_tokens=3, grammar=SCHEMA),
    "plain": SamplingParams(seed=17, max_tokens=LENGTH),
    "plain penalised": SamplingParams(seed=18, max_tokens=LENGTH, frequency_penalty=1.0),
}  # fmt: skip

Expected = dict[str, tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder, model = tmp_path_factory.mktemp("text"), tiny_text.target()
    draft = tiny.draft_of(model)
    return tiny_text.save(model, folder / "target"), tiny_text.save(draft, folder / "draft")


@pytest.fixture(scope="module")
def pair(paths: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = load_pair(config_for(*paths, "draft_model", 3, {}))
    return with_heads(pair, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def reference(paths: tuple[str, str]) -> GrammarReference:
    text = tiny_text.tokenizer().to_str()
    return GrammarReference(paths[0], tiny_text.EOS, tokenizer=text, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def expected(reference: GrammarReference) -> Expected:
    return {name: reference.generate(PROMPT, params) for name, params in FIELDS.items()}


def text_of(tokens: list[int]) -> str:
    return str(tiny_text.tokenizer().decode([t for t in tokens if t not in tiny_text.EOS]))


@pytest.fixture(scope="module")
def pairs(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Return the pairs of drafters that need another draft."""
    _, draft = two_tokenizers.save(tmp_path_factory.mktemp("foreign"))
    foreign = load_pair(config_for(pair.target.path, draft, "foreign", 3, {}), pair.target)
    assert foreign.translation is not None
    own = Pair(pair.target, early_exit(pair.target, 1))
    return {"self": own, "foreign": foreign, "foreign branches": foreign}


VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "whole prompts": {},
    "small blocks, preemption": {"cache": {"block_size": 1, "num_blocks": 78}},
    "alone, chunks of 4": {
        "schedule": {"max_step_tokens": 40, "max_sequences": 18},
        "speculation": {"companions": []},
    },
}
ROWS = [
    ("none", 0),
    ("ngram", 3),
    ("ngram", "adaptive"),
    ("lookahead", 6),
    ("lookahead", 10),
    ("draft_model", 0),
    ("draft_model", 1),
    ("draft_model", 3),
    ("draft_model", 8),
    ("draft_model", "adaptive"),
    ("medusa", 4),
    ("medusa", "adaptive"),
    ("eagle", 4),
    ("suffix", 4),
    ("self", 3),
    ("windowed", 3),
    ("foreign", 4),
    ("branches", 3),
    ("branches", "adaptive"),
    ("foreign branches", 4),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("drafter", "k"), ROWS)
def test_lossless_under_a_grammar(
    drafter: str,
    k: int | str,
    variant: str,
    pair: Pair,
    pairs: dict[str, Pair],
    paths: tuple[str, str],
    expected: Expected,
) -> None:
    """Law: masks hold at every drafted position, whichever proposer is asked, and are rolled back
    with rejected tokens."""
    config, counts = config_for(*paths, drafter, k, VARIANTS[variant]), Counter[str]()
    engine = Engine(config, pair=pairs.get(drafter, pair))
    submit_all(engine, PROMPT, FIELDS)
    replies = Replies(run(engine, counts))
    assert counts["preemptions"] or "preemption" not in variant
    assert (counts[engine.ready.proposer] > 0) == (k != 0) or k == "adaptive"
    for name, (tokens, logprobs) in expected.items():
        assert replies.last[name].error is None, name
        assert replies.tokens[name] == tokens, name
        if name in replies.logprobs:
            assert replies.logprobs[name] == pytest.approx(logprobs, abs=1e-4), name
    gauges = engine.gauges()
    assert (gauges.num_running, gauges.num_waiting, gauges.blocks_used) == (0, 0, 0)


def test_the_replies_are_not_empty(expected: Expected) -> None:
    """Law: the matrix does not pass on empty replies: these are texts of the grammars; some end by
    themselves, some by EOS, some are cut."""
    ended = {name: tokens[-1] in tiny_text.EOS for name, (tokens, _) in expected.items()}
    complete = json.loads(text_of(expected["schema"][0]))
    assert {"name", "true"} <= complete.keys() <= {"name", "true", "list"}
    assert not ended["schema"]  # the brace ended it
    assert ended["regex"] or len(expected["regex"][0]) == LENGTH
    assert len(expected["regex on and on"][0]) == LENGTH
    assert re.fullmatch(REGEX.source, text_of(expected["regex for long"][0]))
    assert len(expected["regex for long"][0]) >= 12
    assert text_of(expected["choice"][0]) in json.loads(CHOICE.source)
    assert text_of(expected["choice of the complete"][0]) in {"abab", "name", "nature", "12"}
    assert text_of(expected["object"][0]).startswith("{")
    assert 2 in expected["calls if it likes"][0][1:]
    assert expected["calls"][0][0] == 2
    constrained = [expected[name][0] for name, params in FIELDS.items() if params.grammar]
    assert max(max(tokens) for tokens in constrained) < VOCAB - tiny_text.PADDING


@pytest.mark.parametrize("name", ["schema", "regex", "object", "lark penalised"])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_oracles_and_a_liar(
    name: str, k: int, pair: Pair, paths: tuple[str, str], expected: Expected
) -> None:
    """Law: right draft tokens are all accepted, in chains and in branches of trees; wrong ones only
    cost rounds, and draft tokens that the grammar forbids are not verified at all."""
    tokens = expected[name][0]
    known = {name: PROMPT + tokens}
    for oracle in (Oracle(known), TreeOracle(known), Liar(known, vocab_size=VOCAB)):
        config = config_for(*paths, "ngram", k, {"cache": {"block_size": 4}})
        engine = Engine(config, pair=pair, proposer=oracle)
        params = FIELDS[name]
        submit_all(engine, PROMPT, {name: params})
        replies = Replies(run(engine))
        assert replies.tokens[name] == tokens, oracle.name
        assert engine.gauges().blocks_used == 0
        if not isinstance(oracle, Liar):
            assert replies.last[name].accepted >= len(tokens) - replies.last[name].rounds > 0


def test_choices_of_one_request_share_a_compilation(
    pair: Pair, paths: tuple[str, str], reference: GrammarReference
) -> None:
    """Law: n choices under one grammar differ only by seed, and each has its own state."""
    fields = {
        str(i): SamplingParams(seed=50 + i, max_tokens=LENGTH, grammar=SCHEMA) for i in range(4)
    }
    engine = Engine(config_for(*paths, "draft_model", 4, {}), pair=pair)
    submit_all(engine, PROMPT, fields)
    replies = Replies(run(engine))
    for name, params in fields.items():
        assert replies.tokens[name] == reference.generate(PROMPT, params)[0]
    assert len({tuple(tokens) for tokens in replies.tokens.values()}) > 1


def test_forced_text_is_proposed_for_free(pair: Pair, paths: tuple[str, str]) -> None:
    """Law: forced text needs no model to draft it and is always accepted; without a draft model, a
    reply that is mostly forced takes few rounds."""
    grammar = Grammar("json_schema", '{"const": {"name": "abname", "true": [true, true, 12]}}')
    params = SamplingParams(seed=1, max_tokens=60, grammar=grammar)
    engine = Engine(config_for(*paths, "ngram", 8, {}), pair=pair)
    submit_all(engine, PROMPT, {"forced": params})
    last = Replies(run(engine)).last["forced"]
    assert last.accepted == last.proposed > 0
    assert last.rounds <= last.accepted / 4


@pytest.mark.parametrize("provenance", [True, False])
def test_the_draft_is_not_asked_for_what_is_forced(
    provenance: bool, pair: Pair, paths: tuple[str, str]
) -> None:
    """Law: within a draft model's chain, the grammar supplies forced text, at no draft forward, and
    it is always accepted; provenance tells the two apart, and so do the counts of the reply,
    whether requested or not."""
    grammar = Grammar("regex", '[ab]{3}"name": true, [ab]{3}"name": 12')
    params = SamplingParams(seed=1, max_tokens=60, grammar=grammar, provenance=provenance)
    engine = Engine(config_for(*paths, "draft_model", 8, {}), pair=pair)
    submit_all(engine, PROMPT, {"mixed": params})
    counts, sums, usage = dict[str, int](), dict[str, tuple[int, int]](), Usage()
    while engine.has_work:
        outputs = engine.step()
        for name, (proposed, accepted) in outputs.metrics.by_proposer.items():
            before = sums.get(name, (0, 0))
            sums[name] = before[0] + proposed, before[1] + accepted
        for output in outputs.items:
            usage.take([output], len(output.tokens), stopped=False)
            for name, count in output.sources or ():
                counts[name] = counts.get(name, 0) + count
    assert usage.by_proposer == {name: own for name, own in sums.items() if own[0]}
    proposed, accepted = sums["grammar"]
    assert proposed >= accepted >= 4
    assert (usage.proposed, usage.accepted) == tuple(map(sum, zip(*sums.values(), strict=True)))
    if provenance:
        assert counts["grammar"] == accepted
        assert counts.get("draft_model", 0) + counts["target"] >= 4


def test_a_grammar_that_is_not_named_does_not_propose(pair: Pair, paths: tuple[str, str]) -> None:
    """Bug: with "speculation": {"proposers": ["draft_model"]} the grammar still proposed within the
    draft model's chain, although the reply said otherwise."""
    grammar = Grammar("regex", '[ab]{3}"name": true, [ab]{3}"name": 12')
    wishes = {
        "draft": Speculation(proposers=("draft_model",)),
        "both": Speculation(proposers=("draft_model", "grammar")),
        "neither": Speculation(max_draft=0),
    }
    fields = {
        name: SamplingParams(
            seed=1, max_tokens=60, grammar=grammar, provenance=True, speculation=wish
        )
        for name, wish in wishes.items()
    }
    engine = Engine(config_for(*paths, "draft_model", 8, {}), pair=pair)
    submit_all(engine, PROMPT, fields)
    outputs = list(run(engine))
    sources = {
        name: {
            source for output in outputs if output.id == name for source, _ in output.sources or ()
        }
        for name in fields
    }
    assert sources["draft"] <= {"draft_model", "target"}
    assert "grammar" in sources["both"]
    assert sources["neither"] == {"target"}
    tokens = Replies(iter(outputs)).tokens
    assert tokens["draft"] == tokens["both"] == tokens["neither"]


@pytest.mark.parametrize("k", [0, 4])
def test_a_grammar_that_cannot_be_followed_ends_its_own_sequence(
    k: int, pair: Pair, paths: tuple[str, str], expected: Expected
) -> None:
    """Bug class: one bad grammar crashes everybody. The engine does not trust the front end: a
    grammar that does not compile, fails later or contradicts other fields is an error of its
    sequence."""
    vocabulary = tiny_text.tokenizer().get_vocab()
    begins = tuple(vocabulary[word] for word in ("a", "ab", "n", "na", "name", "1", "12"))
    bad = {
        "malformed": SamplingParams(seed=1, max_tokens=9, grammar=Grammar("regex", "(")),
        "empty": SamplingParams(
            seed=1, max_tokens=9, grammar=Grammar("lark", 'start: "a" s\ns: "b" s s')
        ),
        "exploding": SamplingParams(
            seed=1, max_tokens=60, grammar=Grammar("regex", "[ab]a{1000000}")
        ),
        "contradicted": SamplingParams(
            seed=1, max_tokens=9, min_tokens=5, stop_token_ids=begins,
            grammar=CHOICE,
        ),
    }  # fmt: skip
    engine = Engine(config_for(*paths, "draft_model", k, {}), pair=pair)
    submit_all(engine, PROMPT, {**bad, "schema": FIELDS["schema"], "plain": FIELDS["plain"]})
    replies = Replies(run(engine))
    for name in bad:
        assert replies.last[name].finish == "error", name
        assert replies.last[name].error
        assert replies.last[name].bad_request
    assert "other fields" in (replies.last["contradicted"].error or "")
    for name in ("schema", "plain"):
        assert replies.tokens[name] == expected[name][0]
    assert engine.gauges().blocks_used == 0


AMBIGUOUS = Grammar("lark", 'start: a\na: a a a | a a | "a" | "b" |')


def ends_of(engine: Engine, fields: dict[str, SamplingParams]) -> dict[str, object]:
    submit_all(engine, PROMPT, fields)
    replies = Replies(run(engine))
    assert engine.gauges().blocks_used == 0
    return {
        name: (replies.tokens[name], replies.last[name].finish, replies.last[name].error)
        for name in fields
    }


def test_where_a_text_breaks_is_the_same_for_every_k(pair: Pair, paths: tuple[str, str]) -> None:
    """Law: the point where a grammar gets too complex depends only on grammar and text. It was a
    limit of CPU time: 150 tokens without speculation, 144 with 8 draft tokens. The law also holds
    for later users of a compiled grammar, and in a batch."""
    fields = {
        str(seed): SamplingParams(seed=seed, max_tokens=90, min_tokens=90, grammar=AMBIGUOUS)
        for seed in (1, 2)
    }
    plain = Engine(config_for(*paths, "draft_model", 0, {}), pair=pair)
    expected = ends_of(plain, fields)
    assert all("max is 500" in str(end) for end in expected.values())
    tokens = {name: PROMPT + end[0] for name, end in expected.items()}  # type: ignore[index]
    engine = Engine(config_for(*paths, "draft_model", 8, {}), pair=pair)
    assert ends_of(engine, fields) == expected
    oracle = TreeOracle(tokens)
    engine = Engine(config_for(*paths, "ngram", 8, {}), pair=pair, proposer=oracle)
    assert ends_of(engine, fields) == expected
    assert ends_of(engine, fields) == expected


def test_a_held_sequence_can_be_aborted(pair: Pair, paths: tuple[str, str]) -> None:
    """Law: an abort ends a sequence whose grammar is still being compiled, exactly once."""
    engine = Engine(config_for(*paths, "draft_model", 2, {}), pair=pair)
    submit_all(engine, PROMPT, {"held": FIELDS["schema"]})
    assert engine.has_work
    engine.abort(["held"])
    assert Replies(run(engine)).last["held"].finish == "abort"
    assert not engine.has_work


def test_a_model_without_a_tokenizer_has_no_grammars(tiny_target: str, tiny_draft: str) -> None:
    """Law: other tests' tiny models lack a tokenizer.json: sequences with a grammar end with a
    sentence, and others run."""
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", 2, {}))
    fields = {"grammar": FIELDS["regex"], "plain": SamplingParams(seed=1, max_tokens=4)}
    submit_all(engine, [5, 17, 9], fields)
    replies = Replies(run(engine))
    error = replies.last["grammar"].error
    assert error is not None
    assert "tokenizer" in error
    assert replies.last["plain"].finish in ("length", "stop")


@pytest.mark.parametrize(
    ("drafter", "k"),
    [
        *(("draft_model", k) for k in (1, 4, "adaptive")),
        *(("medusa", 4), ("eagle", 4), ("lookahead", 10), ("foreign", 4)),
    ],
)
@pytest.mark.parametrize("quality", ["right", "wrong", "half", "unlawful"])
def test_a_prediction_under_a_grammar(
    quality: str,
    drafter: str,
    k: int | str,
    pair: Pair,
    pairs: dict[str, Pair],
    paths: tuple[str, str],
    expected: Expected,
) -> None:
    """Law: the grammar trims a prediction like any proposal, and it combines with forced tokens; no
    text depends on either."""
    qualities: dict[str, Callable[[list[int]], list[int]]] = {
        "right": lambda tokens: tokens,
        "wrong": lambda tokens: tokens[::-1],
        "half": lambda tokens: [*tokens[: len(tokens) // 2], *PROMPT],
        "unlawful": lambda tokens: [(token + 7) % VOCAB for token in tokens],
    }
    predict = qualities[quality]
    engine = Engine(config_for(*paths, drafter, k, {}), pair=pairs.get(drafter, pair))
    fields = {
        name: msgspec.structs.replace(params, prediction=tuple(predict(expected[name][0])))
        for name, params in FIELDS.items()
    }
    submit_all(engine, PROMPT, fields)
    replies = Replies(run(engine))
    assert replies.tokens == {name: tokens for name, (tokens, _) in expected.items()}
    predicted = sum(last.predicted for last in replies.last.values())
    assert predicted > 0 or quality == "unlawful" or k == "adaptive"
    assert engine.gauges().blocks_used == 0
