"""EngineConfig: what the operator configured. Frozen; an unknown key is an error. Facts found at
start (vocabulary, number of blocks, EOS ids) are in `messages.Ready`, never written back here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from engine.errors import ConfigError, ModelError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8", "int4", "fp8"]
DraftQuantizationName = Literal["auto", QuantizationName]
CacheDTypeName = Literal["auto", "fp8"]
AttentionName = Literal["auto", "sdpa", "compiled", "flashinfer", "triton"]

Role = Literal["target", "draft"]
FolderRole = Literal["target", "draft", "medusa", "eagle"]  # the model a folder belongs to

BUILTIN = "demo"
MOST_RANKS = 64  # candidate tokens of a Medusa head
MAX_K = 63  # the largest K that may be configured: a tree with its root fills a mask of 64 bits
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class BaseConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(BaseConfig):
    """The target model."""

    path: str = Field(BUILTIN, description="model folder, hub name, or `demo` (the built-in pair)")
    revision: str | None = Field(
        None, description="branch, tag or commit when `path` is a hub name"
    )
    dtype: DTypeName = Field(
        "auto",
        description="`auto`: bfloat16 on CUDA, and on a CPU with AVX512_BF16 for Llamas stored in"
        " it (large ones on one thread, two with AMX); else float32",
    )
    quantization: QuantizationName = Field(
        "none",
        description="bits of the linear layers' weights. On a CPU `int8`: where compiled code"
        " runs the model (302 M parameters on a Zen 4: 1.6 of bfloat16's tokens/s at K=0, 1.1 with"
        " a draft, 0.76 for prompts). On CUDA all three, by this engine's own kernel, for models"
        " whose layers it fuses and that have no experts: groups of 128 weights share a scale, and"
        " activations stay in 16 bits (compute capability 8.0). Time of an 8 B model on an H200"
        " relative to bfloat16: `int8` 0.71 and `int4` 0.62 for one row, both 0.95 to 0.97 for 64"
        " rows, 1.6 for 160 rows and prompts, 1.8 for 320. `fp8` (e4m3) has the size of `int8` and"
        " a larger error. Other models are refused. A checkpoint that is stored quantised is loaded"
        " by transformers where it can be, with `none` (on CUDA install `accelerate`, too)",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt plus output; default: the model's own"
    )
    trust_remote_code: bool = Field(False, description="run Python code found in the model folder")
    batch_invariant: bool = Field(
        False,
        description="use matrix products and attention (on CUDA `triton`) that give a row the same"
        " bits in any batch, so that a seed's text does not depend on the load; on CUDA slower in"
        " steps of over 64 rows (H200, 8 B: 1.04 of the time at 64 rows, 1.5 at 160, 1.4 for a"
        " prompt of 512 tokens); on a CPU refused unless compiled code runs all rows"
        " in bfloat16",
    )


class CacheConfig(BaseConfig):
    """The paged KV cache."""

    block_size: int = Field(16, ge=1, le=256, description="tokens per block")
    num_blocks: int | None = Field(
        None, ge=2, description="blocks; default: as many as the memory below holds"
    )
    memory_fraction: float = Field(
        0.85, gt=0, le=1, description="share of the GPU's memory, weights included"
    )
    cpu_memory_gib: float = Field(
        1.0, gt=0, description="KV cache memory when the device is the CPU"
    )
    dtype: CacheDTypeName = Field(
        "auto",
        description="type of keys and values; `auto`: the model's; `fp8` (float8_e4m3fn): one byte"
        " each, the text of a seed may then depend on speculation and on other requests in the"
        " batch; needs `attention` `triton` or `sdpa`, not compiled code",
    )
    prefix_caching: bool = Field(True, description="share the KV of equal prompt prefixes")


class ScheduleConfig(BaseConfig):
    """Continuous batching."""

    max_sequences: int = Field(64, ge=1, description="sequences in one step")
    max_step_tokens: int = Field(
        512, ge=1, description="target rows in one step; longer prompts are chunked"
    )
    max_waiting: int = Field(
        256, ge=0, description="queued sequences before new requests get a 429"
    )


class BaseProposerConfig(BaseConfig):
    """A proposer. `trees`: it may propose trees; K then counts nodes."""

    trees: ClassVar[bool] = False


class NoProposerConfig(BaseProposerConfig):
    """Plain decoding."""

    kind: Literal["none"] = "none"


class DraftModelConfig(BaseProposerConfig):
    """A second, smaller causal language model; best with the target's tokenizer."""

    kind: Literal["draft_model"] = "draft_model"
    path: str = Field(BUILTIN, description="draft model folder or hub name")
    revision: str | None = Field(None, description="as target.revision")
    dtype: DTypeName = Field("auto", description="as target.dtype")
    quantization: DraftQuantizationName = Field(
        "auto",
        description="as target.quantization; `auto`: eight bits, by the engine's own code, where it"
        " runs the draft in bfloat16 on a CPU with AMX (a draft need not be exact), else `none`",
    )
    trust_remote_code: bool = Field(False, description="as target.trust_remote_code")
    sliding_window: int | None = Field(
        None,
        ge=1,
        description="attention window of the draft: the last so many tokens, in whole blocks, and"
        " the first block. Draft steps then cost the same after long texts; acceptance may drop,"
        " texts do not change, no memory is freed; default: all tokens",
    )
    branches: int = Field(
        0,
        ge=0,
        le=8,
        description="maximum second-best tokens verified beside a chain, where they pay; on a GPU"
        " the host waits twice in steps that may have some",
    )


def _layers(value: object) -> object:
    if value != "auto" and not (type(value) is int and value > 0):
        raise ValueError(f"it must be a number of layers or `auto`, not {value!r:.40}")
    return value


class SelfConfig(BaseProposerConfig):
    """The target's own first layers under its norm and head (early exit, arXiv:2404.16710)."""

    kind: Literal["self"] = "self"
    layers: Annotated[int | Literal["auto"], BeforeValidator(_layers)] = Field(
        "auto",
        description="how many, fewer than the target has; `auto`: chosen at start from measured"
        " acceptance on the target's own texts and measured step time",
    )


class NgramConfig(BaseProposerConfig):
    """Prompt lookup: propose what followed the last occurrence of the current suffix."""

    kind: Literal["ngram"] = "ngram"
    n_max: int = Field(8, ge=1, le=64, description="longest suffix to look for")
    n_min: int = Field(2, ge=1, le=64, description="shortest suffix to look for")

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.n_min > self.n_max:
            raise ValueError(f"n_min ({self.n_min}) must not exceed n_max ({self.n_max})")
        return self


class LookaheadConfig(BaseProposerConfig):
    """Lookahead decoding: the target's own Jacobi iterations, without a second model. K bounds the
    nodes of window and n-grams together: `window` times (`ngram` - 1), less 1, and `ngram` - 1
    for each verified n-gram."""

    kind: Literal["lookahead"] = "lookahead"
    trees: ClassVar[bool] = True
    window: int = Field(2, ge=1, le=32, description="lookahead positions (W)")
    ngram: int = Field(5, ge=2, le=16, description="tokens of an n-gram (N)")
    guesses: int = Field(
        4, ge=1, le=32, description="n-grams kept per first token, and verified (G)"
    )
    pool: int = Field(
        2048, ge=1, le=1 << 20, description="n-grams kept per request; the oldest is dropped"
    )


class SuffixConfig(BaseProposerConfig):
    """Suffix decoding: propose what most often followed the current suffix, in the request's own
    text and in `speculation.remembered_tokens` of earlier replies."""

    kind: Literal["suffix"] = "suffix"


class MedusaConfig(BaseProposerConfig):
    """Heads on the target's last hidden state, which propose a token tree. K counts its nodes."""

    kind: Literal["medusa"] = "medusa"
    trees: ClassVar[bool] = True
    path: str = Field(
        BUILTIN, description="folder or hub name of the heads, or `demo` (the built-in target's)"
    )
    revision: str | None = Field(None, description="as target.revision")
    heads: int | None = Field(None, ge=1, le=64, description="how many heads to use; default: all")
    choices: tuple[tuple[int, ...], ...] | None = Field(
        None,
        strict=False,
        description="allowed tree paths in the published format, one token rank per head:"
        " `[[0], [0, 0], [1]]`; default: those of the heads' config.json, or all. The likeliest are"
        " used first",
    )

    @field_validator("choices", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        lists = isinstance(value, list) and all(isinstance(path, list) for path in value)
        return tuple(map(tuple, value)) if lists else value

    @field_validator("choices")
    @classmethod
    def _complete(cls, paths: tuple[tuple[int, ...], ...] | None) -> Any:
        for path in paths or ():
            if not path or not all(0 <= rank < MOST_RANKS for rank in path):
                raise ValueError(f"{list(path)} is not a list of ranks from 0 to {MOST_RANKS - 1}")
            if len(path) > 1 and path[:-1] not in (paths or ()):
                raise ValueError(f"{list(path)} needs {list(path[:-1])} as well")
        if paths is not None and not paths:
            raise ValueError("there must be a path; leave choices out for any")
        return paths


class EagleConfig(BaseProposerConfig):
    """EAGLE-3: a head of one layer on the target's hidden states, which proposes a token tree,
    level by level. K counts its nodes."""

    kind: Literal["eagle"] = "eagle"
    trees: ClassVar[bool] = True
    path: str = Field(description="folder or hub name of a head that was trained for this target")
    revision: str | None = Field(None, description="as target.revision")
    depth: int = Field(6, ge=1, le=16, description="maximum levels of a tree")


# Every name that a proposer may have, in the order in which they are shown.
ProposerName = Literal[
    "draft_model", "self", "medusa", "eagle", "lookahead", "suffix", "ngram", "grammar",
    "prediction",
]  # fmt: skip
PROPOSERS: tuple[str, ...] = get_args(ProposerName)
AnyProposer = (
    NoProposerConfig
    | DraftModelConfig
    | SelfConfig
    | MedusaConfig
    | EagleConfig
    | LookaheadConfig
    | SuffixConfig
    | NgramConfig
)
ProposerConfig = Annotated[AnyProposer, Field(discriminator="kind")]


class FixedConfig(BaseConfig):
    """The same K in every round."""

    kind: Literal["fixed"] = "fixed"
    k: int = Field(
        4, ge=0, le=MAX_K, description="tokens proposed in each round; 0 is plain decoding"
    )


class AdaptiveConfig(BaseConfig):
    """The K with the most expected tokens per second."""

    kind: Literal["adaptive"] = "adaptive"
    k_max: int = Field(
        8, ge=0, le=MAX_K, description="largest K it may choose; 0 is always allowed"
    )


ControllerConfig = Annotated[FixedConfig | AdaptiveConfig, Field(discriminator="kind")]


# The kind that a key implies, so that `kind` may be omitted.
KIND_OF_KEY: Mapping[str, Mapping[str, str]] = {
    "controller": {"k": "fixed", "k_max": "adaptive"},
    "proposer": {
        **dict.fromkeys(("path", "sliding_window"), "draft_model"),
        "layers": "self",
        **dict.fromkeys(("heads", "choices"), "medusa"),
        "depth": "eagle",
        **dict.fromkeys(("n_max", "n_min"), "ngram"),
        **dict.fromkeys(("window", "ngram", "guesses", "pool"), "lookahead"),
    },
}
DEFAULT_KIND = {"controller": "adaptive", "proposer": "draft_model"}


def with_kind(name: str, table: Any, default: str | None = None, present: str | None = None) -> Any:
    """Return a table of [speculation] with the `kind` that its keys imply, else `default`.
    `present`: the kind that it overrides, kept if it has all these keys. Raises ConfigError for a
    proposer key that `present` lacks, except `path`, which means a draft model."""
    if not isinstance(table, dict) or "kind" in table or present in _kinds_with(table):
        return table
    kinds = KIND_OF_KEY.get(name, {})
    key = next((key for key in table if key in kinds), None)
    if key not in (None, "path") and name == "proposer" and present is not None:
        assert key is not None
        raise ConfigError(
            f"speculation.proposer.{key} is a key of the kind {kinds[key]!r}, but the kind is"
            f" {present!r}: set speculation.proposer.kind first"
        )
    kind = default if key is None else kinds[key]
    return table if kind is None else {"kind": kind, **table}


def _kinds_with(keys: Iterable[str]) -> set[str]:
    """Return the kinds of proposers that have all of these keys."""
    models = (kind for kind in get_args(AnyProposer) if kind.model_fields.keys() >= {*keys})
    return {model.model_fields["kind"].default for model in models}


Companion = Literal["grammar", "prediction", "suffix", "ngram"]


class SpeculationConfig(BaseConfig):
    """The proposers, and the controller that chooses K. Verification has one, exact rule."""

    proposer: ProposerConfig = DraftModelConfig()
    companions: tuple[Companion, ...] = Field(
        ("grammar", "prediction", "ngram"),
        strict=False,
        description="free proposers: the one with the largest expected gain is used instead of"
        " `proposer` where it gains more; `prediction` needs a request with one; requests may name"
        " others; with proposer `none` nothing is proposed: use `ngram` if there is no draft",
    )
    remembered_tokens: int = Field(
        0,
        ge=0,
        le=1 << 22,
        description="tokens of earlier replies that `suffix` may propose from, each about 200 bytes"
        " of the host's memory; 0: only from the request's own text. A request finds only replies"
        " of its own API key and `cache_salt`: acceptance counts tell clients who share both"
        " whether another got a similar reply",
    )
    controller: ControllerConfig = AdaptiveConfig()
    trace: str | None = Field(
        None,
        min_length=1,
        description="file to record steps in, for `foredraft replay`: sizes, times and acceptance,"
        " no text; if it exists, the next free numbered name is used; then `suffix` and `ngram` are"
        " not used by default, and proposers of trees are refused",
    )
    trace_mib: float = Field(64.0, gt=0, description="size at which the recording ends")
    record_ids: str | None = Field(
        None,
        min_length=1,
        description="file to which the token ids of finished requests, prompt and reply, are"
        " appended, for `foredraft train draft`: it holds what users wrote, so only its owner may"
        " read it",
    )
    record_ids_mib: float = Field(64.0, gt=0, description="size at which that file ends")

    @model_validator(mode="before")
    @classmethod
    def _kinds(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: with_kind(name, table, DEFAULT_KIND.get(name)) for name, table in data.items()
        }

    @field_validator("companions")
    @classmethod
    def _each_once(cls, names: tuple[Companion, ...]) -> tuple[Companion, ...]:
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is named twice")
        return names

    @model_validator(mode="after")
    def _of_chains(self) -> SpeculationConfig:
        if self.trace is not None and self.proposer.trees:
            raise ValueError(
                f"a trace records chains, but {self.proposer.kind!r} proposes trees: remove"
                " speculation.trace"
            )
        return self

    @property
    def branches(self) -> int:
        return self.proposer.branches if isinstance(self.proposer, DraftModelConfig) else 0

    @property
    def k_max(self) -> int:
        """Return the largest K that any step may use."""
        if self.proposer.kind == "none":
            return 0
        return self.controller.k if self.controller.kind == "fixed" else self.controller.k_max


class EngineConfig(BaseConfig):
    """The configuration of the engine process. Field names are the TOML tables."""

    target: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    attention: AttentionName = Field(
        "auto",
        description="attention backend; `auto`: on CUDA `triton`, this engine's own kernel (on an"
        " H200 faster than `flashinfer` in all but prompts, at up to 1,024 tokens of context), on"
        " CPU `compiled` for plain layers on one or two threads, else `sdpa`",
    )
    graphs: bool = Field(
        True, description="capture forwards as CUDA graphs, by number of rows; nothing on a CPU"
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="`auto`: CUDA when there is one"
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the engine; default: all usable CPUs but one"
    )


def model_folder(path: str, role: FolderRole) -> str:
    """Return a model's folder: the built-in pair's for `demo`, else the path as given."""
    if path == BUILTIN:
        return str(Path(__file__).parent / "demo" / role)
    return os.path.expanduser(path)  # unlike Path's, does not raise for an unknown user


def folder_of(path: str, role: FolderRole) -> Path | None:
    """Return a model's local folder, or None if `path` can only be a hub name. Raises ModelError if
    it is neither."""
    # os.path, unlike Path, returns False for a name that no file can have.
    folder, name = os.path.expanduser(path), f"the {role} model {path[:200]!r}"
    if os.path.isdir(folder):
        if not os.path.isfile(os.path.join(folder, "config.json")):
            raise ModelError(f"{name} has no config.json in its folder")
        return Path(folder)
    if HUB_NAME.fullmatch(path) and not os.path.exists(folder):
        return None
    if os.path.isfile(folder):
        raise ModelError(f"{name} is a file: give its folder, {os.path.dirname(folder) or '.'!r}")
    raise ModelError(f"{name} was not found: give a folder with config.json, or org/name of a hub")


def check_folders(config: EngineConfig) -> None:
    """Raise ModelError if a configured model folder is missing, before anything is loaded."""
    proposer = config.speculation.proposer
    folder_of(model_folder(config.target.path, "target"), "target")
    if isinstance(proposer, DraftModelConfig):
        folder_of(model_folder(proposer.path, "draft"), "draft")
    if isinstance(proposer, MedusaConfig):
        folder_of(model_folder(proposer.path, "medusa"), "medusa")
    if isinstance(proposer, EagleConfig):
        folder_of(proposer.path, "eagle")
