"""`foredraft train eagle`: a tiny target's head learns from its own outputs, interrupted or not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from engine.core import Engine
from engine.errors import ConfigError, ModelError
from engine.lab.train import eagle as program
from engine.lab.train.data import Rows
from engine.lab.train.eagle import Learner, accuracy, follow, frequent, layers_of_head, predictions
from engine.lab.train.learning import least_squares
from tests.model.test_eagle import config_for, run
from tests.support import eagle, tiny, tiny_text
from tests.support.domains import sql
from tests.support.stopped_training import same_weights_after_a_kill

POLITE = ["--threads", "1", "--nice", "0", "--length", "48", "--reply", "8", "--continued", "2"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_text.save(tiny_text.target(), tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "shop.sql"
    file.write_text(sql(40))
    return file


def words(target: str, text: Path, output: Path, *more: str) -> list[str]:
    named = ["--target", target, "--text", str(text), "--output", str(output), "--depth", "3"]
    return [*named, *POLITE, *more]


def learner(model: Any, ids: torch.Tensor, depth: int) -> Learner:
    parsed = program.build_parser().parse_args(["--output", "x", "--depth", str(depth)])
    torch.manual_seed(0)
    return Learner(parsed, model, ids)


def test_a_trained_head_agrees_more_and_is_served(
    target: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Law: the loss falls and the printed figures rise at every depth; the output is a checkpoint
    in the published format, which an engine loads and drafts with, and no text depends on it."""
    output, losses = tmp_path / "head", list[float]()

    def watching(*given: Any) -> float:
        losses.append(follow(*given))
        return losses[-1]

    monkeypatch.setattr(program, "follow", watching)
    monkeypatch.setattr(program, "RATE", 1.0)  # a random target is far from any starting point
    assert program.main(words(target, text, output, "--steps", "60", "--vocabulary", "250")) == 0
    assert sum(losses[-5:]) < sum(losses[:5]) - 5 * 0.02
    stdout = capsys.readouterr().out
    rows = [line.split()[2:] for line in stdout.splitlines() if line.startswith("token ")]
    assert len(rows) == 3
    for figures in rows:
        old, new, old_sampled, sampled = map(float, figures)
        assert new > old + 0.02
        assert sampled > old_sampled + 0.05
    assert f"--set speculation.proposer.path={output}" in stdout
    tensors = load_file(output / "model.safetensors")
    assert tensors.keys() == eagle.random_head(torch.zeros(96, 48)).keys()
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == tensors["t2d"].sum() == len(tensors["d2t"]) == 250
    prompts = {str(i): list(range(20 + i, 40 + i)) for i in range(4)}
    for temperature in (0.0, 1.0):
        engine = Engine(config_for(target, str(output), 6))
        replies = run(engine, prompts, temperature=temperature, max_tokens=20)
        plain = Engine(config_for(target, str(output), 0))
        assert replies == run(plain, prompts, temperature=temperature, max_tokens=20)


def test_training_logits_equal_serving_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: training-time test: at each depth and position, logits equal those of the published head
    after the text and then, for draft tokens, after its own outputs."""
    model = tiny_text.target()
    monkeypatch.setattr(program, "layers_of_head", lambda model: (0, 1))  # before the final norm
    ids = torch.randint(3, 250, (2, 12), generator=torch.Generator().manual_seed(2))
    head = learner(model, torch.arange(0, 250, 2), 4)
    with torch.no_grad():
        for weight in head.parameters():  # also weights that start at zero
            weight.add_(0.2 * torch.randn(weight.shape))
    own = {key: each.detach().float() for key, each in head.head.own_weights.items()}
    own["d2t"] = torch.arange(125)
    folder = eagle.save(own, tmp_path / "head", rms_norm_eps=1e-6)
    slow = eagle.SlowHead(folder, model, (0, 1))
    counted = torch.ones(2, 12, dtype=torch.bool)
    found = [offered.view(2, 8, -1) for _, offered in predictions(model, head, Rows(ids, counted))]
    assert len(found) == 4
    for depth, offered in enumerate(found):
        for row, at in ((0, 0), (0, 5), (1, 7)):
            tokens = ids[row].tolist()
            expected = slow.logits(tokens[: at + 2], tokens[at + 2 : at + 2 + depth])
            torch.testing.assert_close(offered[row, at], expected, atol=2e-3, rtol=1e-3)


def test_a_draft_token_is_judged_by_what_the_target_says_there() -> None:
    """Law: a guess is compared with the target's logits after all tokens that the guess has seen,
    where that position counts; a token that the head lacks is a miss."""
    model = tiny_text.target()
    ids = torch.arange(20, 30)[None]
    counted = torch.zeros(1, 10, dtype=torch.bool)
    counted[0, [4, 6]] = True
    head = learner(model, torch.arange(250), 2)
    with torch.no_grad():
        logits = model(ids).logits[0]
    found = list(predictions(model, head, Rows(ids, counted)))
    for wanted, offered in found:
        torch.testing.assert_close(wanted, logits[[4, 6]])
        assert offered.shape == (2, 250)
    right = accuracy(model, head, Rows(ids, counted))
    lacking = torch.tensor([i for i in range(250) if i not in logits[[4, 6]].argmax(-1)])
    assert accuracy(model, learner(model, lacking, 2), Rows(ids, counted))[0][0] == 0.0
    assert len(right) == 2
    assert follow(model, head, ids[:, :2], counted[:, :2]) == 0.0  # too short for any draft token


def test_a_run_that_was_stopped_ends_with_the_same_weights(
    target: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a kill loses only the steps since the last checkpoint."""
    same_weights_after_a_kill(
        program,
        lambda output: words(target, text, output),
        tmp_path,
        "model.safetensors",
        monkeypatch,
    )


def test_it_begins_at_the_least_squares_of_all_batches() -> None:
    """Law: if a linear map generated the data, it is found, also from batches that do not determine
    it alone."""
    generator = torch.Generator().manual_seed(3)
    given, made = torch.randn(4, 6, 9, generator=generator), torch.randn(5, 9, generator=generator)
    torch.testing.assert_close(
        least_squares((some, some @ made.T) for some in given), made, atol=0.02, rtol=0.02
    )


def test_its_vocabulary_has_the_likeliest_next_tokens() -> None:
    """Law: counted where the next token is learnt; ids are in order."""
    ids = torch.tensor([[7, 7, 7, 5, 5, 2, 9, 0]])
    counted = torch.tensor([[False, False, True, True, True, True, False, False]])
    assert frequent(Rows(ids, counted), 2, 12).tolist() == [2, 5]
    assert frequent(Rows(ids, counted), None, 12).tolist() == list(range(12))


@pytest.mark.parametrize(
    ("layers", "taken"), [(32, (1, 15, 28)), (16, (1, 7, 12)), (3, (0, 1, 2)), (1, (0,))]
)
def test_it_takes_a_low_a_middle_and_a_high_layer(layers: int, taken: tuple[int, ...]) -> None:
    """Law: the layers of the paper or, in a target too shallow for three, those it has."""
    assert layers_of_head(tiny.llama(tiny.GROUPED | {"num_hidden_layers": layers})) == taken


def opt() -> PreTrainedModel:
    """Return a model of a family whose layers are nested deeper than usual."""
    shape: dict[str, Any] = {
        "vocab_size": tiny_text.vocab_size(), "hidden_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 512,
    }  # fmt: skip
    return tiny.build(OPTForCausalLM, OPTConfig(**shape))


def test_targets_that_can_have_no_head_are_named(tmp_path: Path) -> None:
    """Law: also refused when a head is to be served. Bug: the first step crashed the engine."""
    folder = tiny_text.save(opt(), tmp_path / "opt")
    with pytest.raises(ModelError, match="OPTForCausalLM has no list of decoder layers"):
        Engine(config_for(folder, folder, 3))
    model: Any = tiny.llama()
    model.set_input_embeddings(torch.nn.Embedding(128, 24))
    given: Any = SimpleNamespace(target=SimpleNamespace(model=model, vocab_size=128))
    with pytest.raises(ConfigError, match="they are 24 wide, and hidden states 48"):
        program.fits(program.build_parser().parse_args(["--output", "x"]), given)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--depth", "0"], "--depth"),
        (["--length", "16", "--depth", "15"], "--length 16 is too short for --depth 15"),
        (["--vocabulary", "9999"], "--vocabulary is 9999; the target has"),
        (["--target", "nowhere/at/all"], "nowhere/at/all"),
        (["--target", "OPT"], "OPTForCausalLM has no list of decoder layers"),
        (["--text", "missing.sql"], "missing.sql"),
    ],
)
def test_mistakes_are_a_sentence(
    more: list[str], message: str, target: str, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Law: exit code 2, and no file remains."""
    if "OPT" in more:
        more = ["--target", tiny_text.save(opt(), tmp_path / "opt")]
    try:
        code = program.main(words(target, text, tmp_path / "head", *more))
    except SystemExit as error:  # raised by argparse
        code = error.code  # type: ignore[assignment]
    assert code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("head*"))
