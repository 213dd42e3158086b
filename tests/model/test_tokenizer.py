"""Tokenizer over real transformers tokenizers, built here: byte-level BPE as in GPT-2, and
SentencePiece-like BPE with byte fallback as in Llama 2. (In this tier because transformers imports
torch.)"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from engine.config import model_folder
from engine.errors import ModelError
from server.errors import ChatTemplateError
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.fake_client import FakeClient, listed_script, make_ready
from tests.support.serving import MODEL, serve

FAST: Any = PreTrainedTokenizerFast  # untyped

TEXTS = [
    "the quick brown fox",
    "naïve café",
    "日本語",
    "a \U0001f468\N{ZERO WIDTH JOINER}\U0001f467 b",
    "x  y\n\n  z",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'villain' %}{{ raise_exception('no villains') }}"
    "{% endif %}[{{ m.role }}]{{ m.content + '' }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level(folder: Path, **options: Any) -> Path:
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    FAST(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        **options,
    ).save_pretrained(folder)
    return folder


def sentencepiece(folder: Path) -> Path:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "\u2581",
        *"thequickbrownfxyz",
        "th",
        "the",
        "\u2581the",
        "\u2581f",
        "ox",
        "\u2581fox",
    ]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("\u2581", "the"),
        ("\u2581", "f"),
        ("o", "x"),
        ("\u2581f", "ox"),
    ]
    tokenizer = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    FAST(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "built-in"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    match request.param:
        case "byte_level":
            return load_tokenizer(str(byte_level(folder)))
        case "sentencepiece":
            return load_tokenizer(str(sentencepiece(folder)))
        case _:
            return load_tokenizer(model_folder("demo", "target"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    """Law: decode(encode(text)) is the text, and so are the tokens' bytes joined (SentencePiece
    adds a leading space)."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined.removeprefix(" ") == text


@pytest.mark.parametrize("text", TEXTS)
def test_increments_equal_the_whole(tokenizer: Tokenizer, text: str) -> None:
    """Law: token by token and in groups, the detokenizer yields the decode of the whole, and never
    splits a character."""
    ids = tokenizer.encode(text + " " + text, add_special_tokens=False)
    random_ = random.Random(text)
    for longest in (1, 2, 5):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        parts, at = [], 0
        while at < len(ids):
            size = random_.randint(1, longest)
            parts.append(detokenizer.push(ids[at : at + size]))
            at += size
        parts.append(detokenizer.flush())
        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=True)
        assert "\ufffd" not in "".join(parts)


def test_random_ids_in_increments(tmp_path: Path) -> None:
    """Law: the same holds for any ids of a byte-level vocabulary, broken characters included."""
    tokenizer = load_tokenizer(str(byte_level(tmp_path)))
    random_ = random.Random(3)
    for _ in range(500):
        ids = [random_.randrange(tokenizer.vocab_size + 5) for _ in range(random_.randint(1, 30))]
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens(tmp_path: Path) -> None:
    """Law: special tokens are skipped or shown as requested, and recognised in text."""
    tokenizer = load_tokenizer(str(byte_level(tmp_path)))
    ids = tokenizer.encode("a<|end|>b", add_special_tokens=False)
    special = [token for token in ids if tokenizer.is_special(token)]
    assert len(special) == 1
    assert tokenizer.token_bytes(special[0]) == b"<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b"


def test_ids_beyond_the_vocabulary(tokenizer: Tokenizer) -> None:
    """Law: ids of padded embedding rows decode to nothing."""
    beyond = tokenizer.vocab_size + 3
    assert tokenizer.token_bytes(beyond) == b""
    assert not tokenizer.is_special(beyond)
    assert tokenizer.decode([beyond], skip_special_tokens=False) == ""


def test_truncation_in_the_file_is_ignored(tmp_path: Path) -> None:
    """Bug to avoid: a tokenizer.json that truncates would silently cut prompts."""
    folder = byte_level(tmp_path)
    inner = Backend.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(folder / "tokenizer.json"))
    ids = load_tokenizer(str(folder)).encode("the quick brown fox" * 3, add_special_tokens=False)
    assert len(ids) > 8


def test_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    """Bug to avoid: the Python wrapper raises "Already borrowed" when two threads encode."""
    expected = tokenizer.encode("the quick brown fox", add_special_tokens=True)
    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(200):
                if tokenizer.encode("the quick brown fox", add_special_tokens=True) != expected:
                    failures.append("different ids")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_chat_template(tmp_path: Path) -> None:
    """Law: the template renders messages and tools; a refusal by the template is a client error."""
    tokenizer = load_tokenizer(str(byte_level(tmp_path, chat_template=TEMPLATE)))
    hello = {"role": "user", "content": "hi"}
    assert tokenizer.has_chat_template
    assert tokenizer.render([hello]) == "[user]hi[assistant]"
    assert tokenizer.render([hello], add_generation_prompt=False) == "[user]hi"
    assert "1 tools" in tokenizer.render([hello], tools=[{"type": "function", "function": {}}])
    with pytest.raises(ChatTemplateError, match="no villains"):
        tokenizer.render([{"role": "villain", "content": "hi"}])
    with pytest.raises(ChatTemplateError):
        tokenizer.render([{"role": "user", "content": None}])


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{% for m in messages %}{{ m.content }", "refused the messages"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_a_broken_template_is_known_at_start(tmp_path: Path, template: str, part: str) -> None:
    """Bug: every client got an error, but the operator was not told."""
    fault = load_tokenizer(str(byte_level(tmp_path, chat_template=template))).template_fault()
    assert fault is not None
    assert part in fault
    assert (
        load_tokenizer(str(byte_level(tmp_path, chat_template=TEMPLATE))).template_fault() is None
    )


def test_no_chat_template(tmp_path: Path) -> None:
    """Law: the error for a model without a template says what to use instead."""
    tokenizer = load_tokenizer(str(byte_level(tmp_path)))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        tokenizer.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("kind", ["missing", "empty", "broken"])
def test_folders_without_a_tokenizer(kind: str, tmp_path: Path) -> None:
    """Law: the error is one sentence that names the folder, never a library's traceback."""
    folder = tmp_path / "model"
    if kind != "missing":
        folder.mkdir()
    if kind == "broken":
        (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(str(folder))
    assert str(folder) in str(caught.value)
    assert kind != "empty" or "tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_in_python_is_refused() -> None:
    """Law: only the Rust backend supports grammars and threads, so no other is accepted."""
    slow = ByT5Tokenizer()
    with pytest.raises(ModelError, match="written in Python"):
        Tokenizer(slow)


@pytest.mark.parametrize("echo", [False, True])
def test_a_completion_goes_on_behind_its_prompt(tmp_path: Path, echo: bool) -> None:
    """Bug: the first word of a completion lost the space before it, as if no text preceded it."""
    tokenizer = load_tokenizer(str(sentencepiece(tmp_path)))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    prompt = tokenizer.encode("the", add_special_tokens=False)
    assert ids[: len(prompt)] == prompt
    size = tokenizer.vocab_size
    ready = make_ready(vocab_size=size, eos_ids=[2])
    client = FakeClient(ready=ready, script=listed_script(ids[len(prompt) :], then=2))
    with serve(client, tokenizer=tokenizer) as served:
        fields = {"model": MODEL, "prompt": "the", "echo": echo, "logprobs": 0}
        reply = httpx.post(f"{served.url}/v1/completions", json=fields).json()
    [choice] = reply["choices"]
    assert choice["text"] == ("the fox" if echo else " fox")
    assert choice["logprobs"]["text_offset"][-1] == (len("the") if echo else 0)
