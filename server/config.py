"""ServerConfig, and load_config, which assembles the whole configuration.

Layers, later ones win: defaults, the TOML file, the environment (two underscores between the parts
of a key: `FOREDRAFT__SPECULATION__CONTROLLER__K=4`), `--set key=value`. The [server] table belongs
to the front end, all others to the engine. Every mistake raises a ConfigError of one sentence: the
key, the given value, and what is allowed. API keys are never shown in these messages.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from engine.config import BUILTIN, DEFAULT_KIND, BaseConfig, EngineConfig, with_kind
from engine.errors import ConfigError
from engine.logs import LogFormat

ENV_PREFIX = "FOREDRAFT__"
BUILTIN_NAME = "foredraft-demo"

ModelName = Annotated[str, Field(min_length=1, max_length=256)]
FormatName = Literal[  # of tool calls
    "hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek_v3", "deepseek_v31", "openai"
]
ReasoningName = Literal["think", "mistral", "harmony"]


# Variables that every template gets anyway, and parameters of `apply_chat_template`.
_TAKEN = re.compile(
    "conversation|messages|tools|documents|chat_template|add_generation_prompt|tokenize|padding|"
    "continue_final_message|truncation|max_length|return_.*|tokenizer_kwargs|.*_token"
)


def _variable(name: str) -> str:
    if not name.isidentifier() or _TAKEN.fullmatch(name):
        raise ValueError("each must be a template variable that the server does not set itself")
    return name


def _origin(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+|null|\*", value):
        raise ValueError(f"an origin looks like https://app.example:8443, or is *, not {value!r}")
    return value


def _sendable(value: str) -> str:
    """Return the key without surrounding whitespace, such as the newline of a secrets file."""
    value = value.strip()
    if not value or not value.isascii() or not value.isprintable():
        raise ValueError("a key must consist of printable ASCII characters, at least one")
    return value


def _network(value: str) -> str:
    try:
        return value if value == "*" else str(ipaddress.ip_network(value))
    except ValueError:
        text = f"a proxy is an address like 10.0.0.7, a network like 10.0.0.0/8, or *, not {value}"
        raise ValueError(text) from None


Key = Annotated[str, AfterValidator(_sendable)]


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ServerConfig(BaseConfig):
    """The front end. Times are in seconds."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0 takes any free port")
    served_model_name: Annotated[list[ModelName] | None, BeforeValidator(_one_or_more)] = Field(
        None,
        min_length=1,
        max_length=64,
        description="name in /v1/models, or a list of names for the one model; default: the last"
        f" part of `target.path`, `{BUILTIN_NAME}` for the built-in pair",
    )
    api_key: Key | None = Field(
        None,
        repr=False,
        description="key required as `Authorization: Bearer ...` by everything but /health, /ready,"
        " /metrics, /version and the page (`server.page`)",
    )
    admin_key: Key | None = Field(
        None,
        repr=False,
        description="key required by `POST /speculation`, which is disabled without it; also valid"
        " wherever `api_key` is",
    )
    api_keys_file: str | None = Field(
        None,
        min_length=1,
        description="TOML file of keys with names and limits, as `foredraft key NAME` writes them;"
        " read again on SIGHUP",
    )
    allow_priority: bool = Field(
        False,
        description="let every request set `priority`, not only those of keys with"
        " `priority = true`",
    )
    tls_certificate: str | None = Field(
        None, min_length=1, description="PEM file of the certificate and its chain; read on SIGHUP"
    )
    tls_key: str | None = Field(
        None, min_length=1, description="PEM file of its key, without a password"
    )
    trusted_proxies: list[Annotated[str, AfterValidator(_network)]] = Field(
        [],
        max_length=64,
        description="addresses or networks of proxies whose `X-Forwarded-For` and"
        ' `X-Forwarded-Proto` are believed, `["*"]` for all',
    )
    tool_parser: Literal["auto", FormatName, "none"] = Field(
        "auto",
        description="form of the model's tool calls; `auto`: as its chat template writes them,"
        " `none`: no tools",
    )
    reasoning_parser: Literal["auto", ReasoningName, "none"] = Field(
        "auto",
        description="how the model marks its thinking; `auto`: as its chat template does, `none`:"
        " thinking is part of the content",
    )
    chat_template_kwargs: list[Annotated[str, AfterValidator(_variable)]] = Field(
        ["enable_thinking"],
        max_length=16,
        description="variables of the chat template that requests may set by"
        " `chat_template_kwargs`",
    )
    max_inflight: int | None = Field(
        None,
        ge=1,
        description="sequences admitted at a time; more are refused with 429; default:"
        " `schedule.max_sequences` + `schedule.max_waiting`",
    )
    max_waiting_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens that may wait for their first token; more are refused with 429,"
        " but one request is admitted whatever its length",
    )
    request_timeout_seconds: float | None = Field(
        None, gt=0, description="a request that takes longer is ended with an error"
    )
    max_logprobs: int = Field(
        2**19,
        ge=1024,
        description="log-probabilities in one reply, alternatives included; more are a 400",
    )
    max_body_bytes: int = Field(
        8 * 2**20, ge=1024, description="largest request body; a larger one gets a 413"
    )
    keep_alive_seconds: int = Field(
        75,
        ge=1,
        description="how long an idle connection stays open: longer than a proxy in front keeps its"
        " own, or requests meet connections that are about to close",
    )
    router_names: bool = Field(
        False,
        description="also report the load under the names that some routers read: in `/metrics`"
        " `vllm:num_requests_running`, `vllm:num_requests_waiting` and `vllm:kv_cache_usage_perc`,"
        " and `GET /get_load`",
    )
    page: bool = Field(
        True,
        description="serve the page at / (chat, race, live view) and the API reference at /docs;"
        " their files need no key, but the requests that they send do",
    )
    cors_origins: Annotated[
        list[Annotated[str, AfterValidator(_origin)]], BeforeValidator(_one_or_more)
    ] = Field(
        [],
        max_length=64,
        description='pages that may call this server from a browser: `["https://app.example"]`, or'
        ' `"*"` for all, which without a key lets every page that a user opens send requests.'
        " Requests from other pages are a 403 unless the server has a key; so are those from its"
        " own page if that is opened by plain HTTP under a public name",
    )
    unknown_fields: Literal["refuse", "warn"] = Field(
        "refuse",
        description="how to handle unknown request fields: `refuse` with a 400, or `warn`: ignore"
        " them, list them in the header `X-Ignored-Fields` and log at most a line a minute",
    )
    grammar_seconds: float = Field(
        0.5, gt=0, le=10, description="CPU time to compile a grammar or schema; more is a 400"
    )
    max_grammar_bytes: int = Field(
        2**17, ge=1024, description="longest grammar or schema; a longer one is a 400"
    )
    grace_seconds: float = Field(
        30.0, ge=0, description="how long running requests may finish after SIGTERM"
    )
    watchdog_seconds: float = Field(
        30.0, gt=0, description="an engine silent for that long is killed and restarted"
    )
    start_timeout_seconds: float = Field(
        600.0, gt=0, description="an engine that is not ready by then is killed"
    )
    max_restarts: int = Field(
        5, ge=0, description="restarts of the engine in a row before the server gives up"
    )
    restart_window_seconds: float = Field(
        300.0, gt=0, description="serving for that long resets the count of restarts"
    )
    resume_seconds: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="how long running requests are held after the engine is lost, until the next"
        " engine resumes them; 0: fail them at once",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="what is logged on stderr; never prompts, replies or keys. Requests are"
        " logged at `info`, successful probes and scrapes at `debug`",
    )
    log_format: LogFormat = Field(
        "text", description="readable lines, or one JSON object per line; also the engine's"
    )
    otlp_endpoint: str | None = Field(
        None,
        min_length=1,
        description="collector for traces, `http://host:4318`, over OTLP/HTTP; default:"
        " `OTEL_EXPORTER_OTLP_ENDPOINT`; neither: no traces. `pip install 'foredraft[otel]'`",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("`tls_certificate` and `tls_key` are only used together")
        return self


@dataclass(frozen=True)
class Config:
    """`notes`: sentences for the log about defaults that were chosen for the operator."""

    server: ServerConfig
    engine: EngineConfig
    notes: tuple[str, ...] = ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may use for the model, without duplicates; the first is announced."""
        path = self.engine.target.path
        if self.server.served_model_name is not None:
            return tuple(dict.fromkeys(self.server.served_model_name))
        return (BUILTIN_NAME if path == BUILTIN else Path(path).resolve().name or path,)

    @property
    def max_inflight(self) -> int:
        """The most sequences admitted at a time."""
        schedule = self.engine.schedule
        return self.server.max_inflight or schedule.max_sequences + schedule.max_waiting


class _All(EngineConfig):
    """All keys of a file: one validation reports errors of both halves with full keys."""

    server: ServerConfig = ServerConfig()


def overrides_of(options: Mapping[str, str | int | Sequence[str] | None]) -> list[str]:
    """Return command-line options as `key=value` for `--set`, without those that are None. Strings
    are quoted, so that a name like `4` stays a string. A proposer path implies a draft model."""
    given = {key: value for key, value in options.items() if value is not None}
    found = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    is_draft = "speculation.proposer.path" in given
    return [*(["speculation.proposer.kind=draft_model"] if is_draft else []), *found]


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Config:
    """Return the merged configuration. `overrides`: `key=value` of `--set`. Raises ConfigError."""
    data = {} if path is None else _with_kinds(_read(Path(path)), {})
    given = [
        (name.removeprefix(ENV_PREFIX).lower().replace("__", "."), text, f"the variable {name}")
        for name, text in sorted((env or {}).items())
        # An empty API key is kept, and refused later: an unmounted secret must not mean "no key".
        if name.startswith(ENV_PREFIX) and (text != "" or name.endswith(("API_KEY", "ADMIN_KEY")))
    ]
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override} has no value; it must look like key=value")
        given.append((key.strip(), text.strip(), f"--set {override}"))
    # Each `kind` is merged first, since it decides which other keys are valid.
    for key, text, source in sorted(given, key=lambda each: not each[0].endswith(".kind")):
        data = _merge(data, _with_kinds(_nest(key, text, source), data))
    data, notes = _fit_proposer(data)
    try:
        config = _All.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, _All, data)) from None
    engine = EngineConfig(**{name: getattr(config, name) for name in EngineConfig.model_fields})
    return Config(config.server, engine, notes)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not valid TOML: {error}") from None


def _nest(key: str, text: str, source: str) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b". The text is read as TOML; a bare word is a string."""
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"{source} names no key; a key looks like speculation.controller.k")
    value = _typed(text)
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def _typed(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    is_one = len(parsed) == 1 and isinstance(parsed["value"], int | float | str | list | dict)
    return parsed["value"] if is_one else text


def _with_kinds(layer: dict[str, Any], lower: dict[str, Any]) -> dict[str, Any]:
    """Return `layer` with the `kind` filled in where its keys imply another one than in `lower`."""
    speculation, below = layer.get("speculation"), lower.get("speculation")
    if not isinstance(speculation, dict):
        return layer
    below = below if isinstance(below, dict) else {}
    present = {name: each.get("kind") for name, each in below.items() if isinstance(each, dict)}
    tables = {
        name: with_kind(name, table, present=present.get(name))
        for name, table in speculation.items()
    }
    return {**layer, "speculation": tables}


def _merge(lower: dict[str, Any], upper: dict[str, Any], *, name: str = "") -> dict[str, Any]:
    """Merge `upper` over `lower`. A different `kind` replaces the table, as old keys do not fit."""
    kind = upper.get("kind")
    if kind is not None and lower and kind != lower.get("kind", DEFAULT_KIND.get(name)):
        return upper
    merged = dict(lower)
    for key, value in upper.items():
        if isinstance(value, dict) and key in merged:
            if not isinstance(merged[key], dict):
                shown = _shown([key], merged[key])
                raise ConfigError(f"{key} = {shown} is not allowed: it must be a table")
            value = _merge(merged[key], value, name=key)
        merged[key] = value
    return merged


def _fit_proposer(data: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Default to n-gram lookup, which needs no model, for any target but the built-in one: the
    built-in draft fits only that one."""
    target, speculation = data.get("target", {}), data.get("speculation", {})
    if not isinstance(target, dict) or not isinstance(speculation, dict):
        return data, ()
    if target.get("path", BUILTIN) == BUILTIN or speculation.get("proposer"):
        return data, ()
    note = f"no draft model is named for the target {target['path']}: n-gram lookup proposes"
    return {**data, "speculation": {**speculation, "proposer": {"kind": "ngram"}}}, (note,)


SECRETS = frozenset({"api_key", "admin_key", "sha256"})
LONGEST_SHOWN = 80


def explain(
    error: ValidationError, model: type[BaseModel], data: Mapping[str, Any], *, hide: bool = False
) -> str:
    """Return the first validation error as a sentence; `hide`: without the given value."""
    first = error.errors(include_url=False)[0]
    path = _written_path(first["loc"], data)
    key, given = ".".join(path) or "the configuration", first["input"]
    match first["type"]:
        case "extra_forbidden":
            return _unknown_key(path, model, {} if hide else data)
        case "missing":  # the error's `input` is the whole table
            *parents, field = first["loc"]
            return f"{'.'.join([*_written_path(tuple(parents), data), str(field)])} is missing"
        case "union_tag_invalid":
            key, given = f"{key}.kind", first["ctx"]["tag"]
            allowed = f"it must be one of {first['ctx']['expected_tags']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            allowed = "it must be a table"
        case "value_error":
            return f"{key} is not allowed: {first['ctx']['error']}"
        case "string_type":
            allowed = 'it must be a string (write "..." around it)'
        case _:
            allowed = re.sub("^(Input|String) should", "it must", first["msg"])
    shown = "(hidden)" if hide else _shown(path, given)
    return f"{key} = {shown} is not allowed: {allowed}"


def _shown(path: list[str], given: object) -> str:
    if path and path[-1] in SECRETS:
        return "(hidden)"
    if "{" in repr(given) and not isinstance(given, str):
        return "a table"  # there may be secrets in it
    text = given if isinstance(given, str) else repr(given)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def _written_path(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    """Return pydantic's error location without union tags, which are not in the data."""
    path: list[str] = []
    at: Any = data
    for part in loc:
        if isinstance(at, dict) and part not in at and at.get("kind", part) == part:
            continue
        path.append(str(part))
        at = at.get(part) if isinstance(at, dict) else None
    return path


def _unknown_key(path: list[str], model: type[BaseModel], data: Mapping[str, Any]) -> str:
    *parents, name = path
    models, table = [model], data
    for part in parents:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        models = [found for field in fields for found in nested_models(field.annotation)]
        table = table.get(part, {})
    kind = table.get("kind")
    fitting = [m for m in models if kind is None or kind_of(m) == kind] or models
    known = list(dict.fromkeys(key for m in fitting for key in m.model_fields))
    where = ".".join(parents)
    sentence = f"unknown key {'.'.join(path)}; {where or 'the top level'}"
    if kind is not None:
        sentence += f" of kind {kind}"
    sentence += f" knows {', '.join(known)}"
    close = get_close_matches(name, known, n=1)
    return f"{sentence} (did you mean {close[0]}?)" if close else sentence


def nested_models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models that an annotation allows: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated):
        for member in get_args(annotation):
            yield from nested_models(member)


def kind_of(model: type[BaseModel]) -> str | None:
    """Return the `kind` that selects this member of a union; None if it has none."""
    field = model.model_fields.get("kind")
    return None if field is None else str(field.default)
