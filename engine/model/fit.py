"""Whether a draft fits a target, and other checks of both. Most need only small files and run
before any weights are read, so that a pair that cannot work fails at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import AnyProposer, DraftModelConfig, ModelConfig, Role, folder_of, model_folder
from engine.cpu.jit import multiplies
from engine.errors import ModelError
from engine.grammar.translation import Translation
from engine.grammar.vocabulary import load_vocabulary, token_texts
from engine.model.checkpoint import model_file
from engine.model.loaded import LoadedModel
from engine.scheduling.memory import parameters_in

logger = logging.getLogger(__name__)

SWAPPED = 1.5  # a draft with more than this multiple of the target's parameters is refused

LEAST_SHARED = 0.1  # of the smaller vocabulary; a draft that shares less proposes hardly anything


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's vocabulary: the width of its logits, its EOS ids, its tokenizer.json."""

    name: str
    role: Role
    size: int
    eos_ids: tuple[int, ...]
    file: Path | None

    @classmethod
    def of(cls, model: LoadedModel, before: Vocabulary | None = None) -> Vocabulary:
        """The vocabulary of a loaded model; `before`: what its files said, if known."""
        if before is not None:
            return replace(before, size=model.vocab_size, eos_ids=model.eos_ids)
        file = model.folder and model_file(model.path, model.folder, "tokenizer.json", None)
        return cls(model.path, model.role, model.vocab_size, model.eos_ids, file)

    def texts(self) -> dict[int, str]:
        """Return the text of each id. Raises ModelError."""
        assert self.file is not None
        try:
            return token_texts(self.file)
        except Exception as error:  # the Rust library raises plain Exception
            raise ModelError(
                f"the {self.role} model {self.name!r} has a tokenizer.json that cannot be read: "
                f"{error}"
            ) from error


def vocabulary_in(model_config: ModelConfig | DraftModelConfig, role: Role) -> Vocabulary | None:
    """Read a vocabulary from the small files in a folder or on the hub; None if they do not say it.
    Raises ModelError."""
    path = model_folder(model_config.path, role)
    folder = folder_of(path, role)

    def file(name: str) -> Path | None:
        return model_file(path, folder, name, model_config.revision)

    config, generation = _json(file("config.json")), _json(file("generation_config.json"))
    size, eos = config.get("vocab_size"), generation.get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if type(size) is not int or not all(type(i) is int for i in ids):
        return None
    return Vocabulary(path, role, size, ids, file("tokenizer.json"))


def _json(file: Path | None) -> dict[str, Any]:
    """Return the file's object, or {} if it cannot be read: its user reports the error."""
    try:
        found = {} if file is None else json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_swapped(models: Mapping[Role, ModelConfig | DraftModelConfig]) -> None:
    """Raises ModelError if the draft has many more parameters than its target, by the headers of
    local files. Quantised models are not checked."""
    paths = {role: model_folder(model.path, role) for role, model in models.items()}
    sizes = {role: parameters_in(Path(path)) for role, path in paths.items()}
    target, draft = sizes.get("target"), sizes.get("draft")
    if target is not None and draft is not None and draft > SWAPPED * target:
        raise ModelError(
            f"the draft model {paths['draft']!r} has {draft / 1e6:,.1f} M parameters, more than the"
            f" target model {paths['target']!r} with {target / 1e6:,.1f} M: are they swapped?"
        )


def warn_of_slow(
    models: Mapping[Role, ModelConfig | DraftModelConfig],
    device: str,
    knows: Callable[[str], bool] = multiplies,
) -> None:
    """Log a warning for each configured dtype that this CPU has no instructions for."""
    for role, model in models.items():
        if device == "cpu" and model.dtype != "auto" and not knows(model.dtype):
            logger.warning(
                "the %s's dtype is %r, which is slow on this CPU, since it has no instructions for"
                " it: leave dtype out, or say 'float32'", role, model.dtype,
            )  # fmt: skip


def compare_files(
    target: ModelConfig, draft: AnyProposer
) -> tuple[Vocabulary | None, Vocabulary | None, Translation | None]:
    """Return the vocabularies of both (None if the files do not say them) and the result of
    `compare`; all None if `draft` is no model. Raises ModelError, also if the two are swapped."""
    if not isinstance(draft, DraftModelConfig):
        return None, None, None
    refuse_swapped({"target": target, "draft": draft})
    ours, theirs = vocabulary_in(target, "target"), vocabulary_in(draft, "draft")
    return ours, theirs, compare(ours, theirs) if ours and theirs else None


def check_pair(target: LoadedModel, draft: LoadedModel) -> Translation | None:
    """`compare` two loaded models. Raises ModelError, also if the draft has fewer positions."""
    check_lengths(target, draft)
    return compare(Vocabulary.of(target), Vocabulary.of(draft))


def check_lengths(target: LoadedModel, draft: LoadedModel) -> None:
    """Raises ModelError if the draft has fewer positions than the target serves."""
    if draft.max_model_len < target.max_model_len:
        raise ModelError(
            f"{_pair(target.path, draft.path)}: it has {draft.max_model_len} positions, the target"
            f" is to serve {target.max_model_len}; set target.max_model_len to"
            f" {draft.max_model_len} or less"
        )


def compare(target: Vocabulary, draft: Vocabulary) -> Translation | None:
    """Return None if all ids below the smaller vocabulary size mean the same token in both, else a
    Translation. Padded embedding rows are ignored. Raises ModelError if a tokenizer.json is missing
    and the sizes differ, or if the vocabularies share too little."""
    pair = _pair(target.name, draft.name)
    if target.file is None or draft.file is None:
        if target.size != draft.size:
            raise ModelError(
                f"{pair}: their vocabularies have {draft.size} and {target.size} tokens, and"
                " without a tokenizer.json in both folders they cannot be compared"
            )
        return None
    ours, theirs = target.texts(), draft.texts()
    shared = min(target.size, draft.size)
    every = (i for i in sorted(ours.keys() | theirs.keys()) if i < shared)
    odd = next((i for i in every if ours.get(i) != theirs.get(i)), None)
    if odd is None:
        return None
    try:
        both = [
            load_vocabulary(str(each.file.parent), vocab_size=each.size, eos_ids=each.eos_ids)
            for each in (target, draft)
            if each.file is not None
        ]
    except ModelError as error:
        raise ModelError(
            f"{pair}: token {odd} is {theirs.get(odd)!r} for the draft and {ours.get(odd)!r} for "
            f"the target, and their texts cannot be compared ({error})"
        ) from error
    found = Translation(*both, vocab_size=target.size, draft_size=draft.size)
    counts = f"{len(found.target_ids)} of its {found.sizes[1]} tokens are among the target's"
    if found.shared_fraction < LEAST_SHARED:
        raise ModelError(f"{pair}: its tokenizer is another one, and only {counts}")
    logger.info(
        "the draft model %r has a tokenizer of its own: %s %d, and drafts those one by one",
        draft.name, counts, found.sizes[0],
    )  # fmt: skip
    return found


def _pair(target: str, draft: str) -> str:
    return f"the draft model {draft!r} does not fit the target model {target!r}"
