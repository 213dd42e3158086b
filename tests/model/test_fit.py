"""Problems that the files of a pair show are reported before any weights are read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.config import DraftModelConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.cpu.jit import multiplies
from engine.errors import ModelError
from engine.model.fit import vocabulary_in, warn_of_slow
from engine.model.pair import load_pair
from tests.support import tiny

UNREADABLE = {"hidden_size": 7, "num_attention_heads": 3}  # for weights of other shapes


def broken(folder: str, to: Path, **changes: object) -> Path:
    """Copy a model with a config that makes its weights unloadable, so reading them raises."""
    to.mkdir()
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | UNREADABLE | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def refusal(target: Path, draft: Path) -> str:
    speculation = SpeculationConfig(proposer=DraftModelConfig(path=str(draft)))
    config = EngineConfig(target=ModelConfig(path=str(target)), speculation=speculation)
    with pytest.raises(ModelError) as caught:
        load_pair(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def words(folder: Path, stem: str) -> None:
    tokenizer = Tokenizer(WordLevel({f"{stem}{i}": i for i in range(tiny.VOCAB)}, f"{stem}0"))
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_draft_larger_than_its_target_is_taken_for_swapped(
    tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    """Bad input: --target and --draft the other way round."""
    small, large = broken(tiny_draft, tmp_path / "t"), broken(tiny_target, tmp_path / "d")
    message = refusal(small, large)
    assert f"the draft model '{large}' has 0." in message
    assert f"more than the target model '{small}' with 0." in message
    assert message.endswith("are they swapped?")
    assert "swapped" not in refusal(large, small)  # refused for its unloadable weights


def test_quantised_weights_have_no_known_size(
    tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    """Law: one stored number may hold eight weights, so no size is claimed for such a target."""
    import numpy as np

    small, large = broken(tiny_draft, tmp_path / "t"), broken(tiny_target, tmp_path / "d")
    (small / "model.safetensors").unlink()
    save_file({"qweight": np.zeros((2, 2), np.int32)}, small / "model.safetensors")
    assert "swapped" not in refusal(small, large)


def test_another_vocabulary_is_refused_before_weights_are_read(
    tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    target, draft = broken(tiny_target, tmp_path / "t"), broken(tiny_draft, tmp_path / "d")
    words(target, "t")
    words(draft, "word")
    assert "token 0 is 'word0' for the draft and 't0' for the target" in refusal(target, draft)
    (draft / "tokenizer.json").unlink()
    words(target, "t")
    config = json.loads((draft / "config.json").read_text()) | {"vocab_size": 136}
    (draft / "config.json").write_text(json.dumps(config))
    assert "their vocabularies have 136 and 128 tokens" in refusal(target, draft)


@pytest.mark.parametrize("wrong", [{"vocab_size": "many"}, {"eos_token_id": [None]}])
def test_unreadable_vocabularies_are_left_to_the_loader(
    wrong: dict[str, object], tiny_target: str, tmp_path: Path
) -> None:
    folder = broken(tiny_target, tmp_path / "t", **wrong)
    if (file := folder / "generation_config.json").is_file():
        file.unlink()
    assert vocabulary_in(ModelConfig(path=str(folder)), "target") is None


def test_a_slow_dtype_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Law: a CPU without instructions for a dtype is reported; `auto` never takes that dtype."""
    models = {"target": ModelConfig(dtype="float16"), "draft": DraftModelConfig()}
    with caplog.at_level(logging.WARNING):
        warn_of_slow(models, "cuda", lambda name: False)  # type: ignore[arg-type]
        warn_of_slow(models, "cpu", lambda name: True)  # type: ignore[arg-type]
        assert not caplog.messages
        warn_of_slow(models, "cpu", lambda name: False)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1
    assert "the target's dtype is 'float16', which is slow on this CPU" in caplog.messages[0]
    assert multiplies("float32")
