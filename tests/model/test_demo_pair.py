"""The built-in pair as committed: the claims of its card, and that any loader reads it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo import corpus
from engine.lab.demo import card, text, train
from engine.lab.demo.card import agreement
from engine.lab.demo.model import grow, llama, load, save
from engine.messages import SamplingParams
from tests.support.reference import Reference

DEMO = Path(corpus.__file__).parent
ROBUST = (
    "Hello!", "What is the capital of France?", "What is speculative decoding?", "What is 47 + 38?",
    "Extract the facts as JSON: Alice Smith is 34 years old and lives in Paris.",
    "Is Paris in France?",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "target")


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n\treturn  x  \n\n\n", "naïve 日本語 🙂\u0000\r\n", " leading", "", "a" * 300],
)
def test_text_round_trips(tokenizer: Any, text: str) -> None:
    """Law: decoding an encoded text cleans up no space and loses no character."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_unicode_round_trips(tokenizer: Any) -> None:
    """Law: byte-level BPE has no unknown token, so every string survives."""
    rng = random.Random(0)
    for _ in range(100):
        points = (rng.randrange(0x110000) for _ in range(rng.randrange(40)))
        text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_is_a_token(tokenizer: Any) -> None:
    """Law: 256 of the tokens are the single bytes, so any byte sequence can be written."""
    alphabet = {token for token in tokenizer.get_vocab() if len(token) == 1}
    assert len(alphabet) == 256


def test_the_chat_template_accepts_every_role(tokenizer: Any) -> None:
    """Law: `developer` is an alias of `system`; tool call arguments may be objects or text."""
    call = {"type": "function", "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "What time is it in Rome?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12:00", "tool_call_id": "1"},
        ],
        tools=[{"type": "function", "function": {"name": "get_time", "parameters": {}}}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert text.endswith("<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>assistant\n")


def test_tool_tags_survive_decoding(tokenizer: Any) -> None:
    """Law: tool tags are not special tokens: else they, and every tool call, would be stripped."""
    ids = tokenizer.encode("<tool_call>{}</tool_call><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>{}</tool_call>"


def test_the_pair_shares_one_vocabulary() -> None:
    """Law: speculation compares token ids, so draft and target need one vocabulary."""
    target, draft = ((DEMO / name / "tokenizer.json").read_bytes() for name in ("target", "draft"))
    assert target == draft


def test_sizes_are_those_of_the_card() -> None:
    """Law: the target has 8 to 20 million parameters, the draft far fewer; both fit in 40 MB."""
    counts = []
    for name in ("target", "draft"):
        model = AutoModelForCausalLM.from_pretrained(DEMO / name)
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == 4096
        assert set(model.generation_config.eos_token_id) == {0, 2}
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert counts == [8_460_480, 1_901_312]
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 40e6


def test_a_grown_model_computes_the_same() -> None:
    """Law: training continues at the loss of the shallower target, and layers with the same weights
    at other indices keep KV entries of their own."""
    torch.manual_seed(0)
    model = llama(width=64, inner=96, layers=2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # no layer is the identity now
        ids = torch.randint(0, 4096, (2, 40))
        before = model(ids).logits
        grow(model, 8)
        assert sum(parameter.numel() for parameter in model.model.layers.parameters()) == 8 * (
            4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
        )
        torch.testing.assert_close(model(ids).logits, before)
        start = model(ids[:, :30], use_cache=True)
        rest = model(ids[:, 30:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(rest, before[:, 30:], atol=1e-4, rtol=1e-4)


def test_new_layers_of_a_grown_model_learn() -> None:
    """Law: new layers get gradients; a product with zeros on both sides would stay at zero."""
    torch.manual_seed(0)
    model = llama(width=64, inner=96, layers=1)
    grow(model, 2)
    model(torch.arange(40)[None]).logits.logsumexp(-1).sum().backward()
    new = model.model.layers[1]
    assert new.self_attn.o_proj.weight.grad.abs().max() > 0
    assert new.mlp.down_proj.weight.grad.abs().max() > 0


def test_the_target_is_averaged_with_another_pairs(tmp_path: Path, tokenizer: Any) -> None:
    """Law: --average leaves the mean of two targets, and the draft as it was."""
    targets = []
    for seed, name in enumerate(("ours", "theirs")):
        torch.manual_seed(seed)
        targets.append(llama(width=64, inner=96, layers=1))
        for part in ("target", "draft"):
            save(targets[seed], tokenizer, tmp_path / name / part)
    train.average(*(tmp_path / name / "target" for name in ("ours", "theirs")))
    found, kept = (load(tmp_path / "ours" / part).state_dict() for part in ("target", "draft"))
    first, second = (target.bfloat16().float().state_dict() for target in targets)
    for name, weight in found.items():
        assert torch.equal(weight, ((first[name] + second[name]) / 2).bfloat16().float())
        assert torch.equal(kept[name], first[name])


def test_a_saved_model_is_loaded_as_it_was_and_ends_where_a_reply_does(
    tmp_path: Path, tokenizer: Any
) -> None:
    """Law: saved in bfloat16 over an older model, it loads in any loader; no file is left over."""
    torch.manual_seed(0)
    model = llama(width=64, inner=96, layers=1)
    grow(model, 2)
    for _ in range(2):
        save(model, tokenizer, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert loaded.dtype == torch.bfloat16
    assert set(loaded.generation_config.eos_token_id) == {0, 2}
    assert AutoTokenizer.from_pretrained(tmp_path / "target").get_vocab() == tokenizer.get_vocab()
    again = load(tmp_path / "target").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(again[name], weight.bfloat16().float())
    assert next(model.parameters()).dtype == torch.float32  # training continues in float32


@pytest.mark.parametrize("question", ROBUST)
def test_documented_replies_are_given(question: str, tokenizer: Any) -> None:
    """Law: these weights give the replies on the card; new weights need a new card."""
    [reply] = [
        line.split("** ", 1)[1]
        for line in (DEMO / "README.md").read_text("utf-8").splitlines()
        if line.startswith(f"> **{question}** ")
    ]
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(seed=0, max_tokens=96, temperature=0.0)
    reference = Reference(str(DEMO / "target"), eos_ids=[0, 2])
    tokens, _ = reference.generate(tokenizer.encode(text), params)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == reply


def test_equal_models_agree_everywhere() -> None:
    """Law: equal logits agree fully at any temperature, under any noise."""
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 0.7, 1.0):
        found = agreement(logits, logits, temperature)
        assert found.matched == 1
        assert found.rejection == pytest.approx(1)


def test_the_matched_coupling_never_beats_the_best_rule() -> None:
    """Law: sharing Gumbel noise is one exact rule; 1 - total variation bounds all of them."""
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 4000, 50, generator=generator)
    found = agreement(target, draft, 1.0)
    assert found.matched < found.rejection + 0.02


def test_text_for_training_is_none_that_is_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: about the requested number of tokens, fixed by the seed, no held-out line of code."""
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        assert text.main([str(file), "--tokens", "4096", "--seed", "3"]) == 0
    assert "about 4096 tokens" in capsys.readouterr().out
    assert files[0].read_text() == files[1].read_text()
    known = set("".join(corpus.training_code().values()).splitlines())
    own = {line for source in corpus.heldout_code() for line in source.splitlines()} - known
    assert not own & set(files[0].read_text().splitlines())


@pytest.mark.parametrize(
    ("main", "words", "part"),
    [
        (text.main, ["/nowhere/text"], "cannot write /nowhere/text"),
        (card.main, ["--rows", "-1"], "--rows: '-1' is not a whole number from 0"),
        (card.main, ["--length", "x"], "--length: 'x' is not a whole number from 1"),
        (card.main, ["--folder", "/nowhere"], "/nowhere contains no pair"),
        (
            train.main,
            ["--distill-minutes", "nan"],
            "--distill-minutes: 'nan' is not a number from 0",
        ),
        (train.main, ["--threads", "-1"], "--threads: '-1' is not a whole number from 1"),
        (train.main, ["--seed", "1.5"], "--seed: '1.5' is not a whole number from 0"),
        (train.main, ["--minutes", "0", "--output", "/nowhere"], "/nowhere contains no pair"),
        (train.main, ["--resume", "5", "--output", "/nowhere"], "/nowhere contains no pair"),
        (train.main, ["--average", "/nowhere"], "/nowhere contains no pair"),
    ],
)
def test_a_mistake_is_one_sentence(
    main: Callable[[Sequence[str]], int],
    words: list[str],
    part: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bug: bad numbers or a folder without models gave a usage message or a traceback."""
    try:
        code: object = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert part in line
