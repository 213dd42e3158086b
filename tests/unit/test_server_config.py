"""Configuration: layers, kinds, and one sentence for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from engine.config import (
    AdaptiveConfig,
    AnyProposer,
    DraftModelConfig,
    FixedConfig,
    MedusaConfig,
    NgramConfig,
)
from engine.errors import ConfigError
from server.config import load_config, overrides_of

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def refusal(*overrides: str, env: dict[str, str] | None = None, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, env)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_serve_the_built_in_pair() -> None:
    """Law: without file and flags, the built-in pair runs on localhost with adaptive K."""
    config = load_config(None)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.model_names[0] == "foredraft-demo"
    assert config.max_inflight == 64 + 256
    assert config.engine.speculation.proposer == DraftModelConfig()
    assert config.engine.speculation.controller == AdaptiveConfig()
    assert config.notes == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load(path: Path) -> None:
    """Law: every file in configs/ is valid, and fixed and adaptive K both work on top of it."""
    assert load_config(path).server.port == 8000
    fixed = load_config(path, ["speculation.controller.k=4"]).engine.speculation
    assert fixed.controller == FixedConfig(k=4)
    adaptive = load_config(path, ["speculation.controller.k_max=3"]).engine.speculation
    assert adaptive.controller == AdaptiveConfig(k_max=3)
    assert load_config(path, ["speculation.proposer.kind=none"]).engine.speculation.k_max == 0


def test_every_proposer_has_a_config() -> None:
    """Law: each kind of proposer has a file in configs/, and so have a draft's trees and window."""
    proposers = [load_config(path).engine.speculation.proposer for path in CONFIGS]
    kinds = {kind.model_fields["kind"].default for kind in get_args(AnyProposer)}
    assert {proposer.kind for proposer in proposers} == kinds
    drafts = [proposer for proposer in proposers if isinstance(proposer, DraftModelConfig)]
    assert any(draft.branches for draft in drafts)
    assert any(draft.sliding_window for draft in drafts)


def test_later_layers_win(tmp_path: Path) -> None:
    """Law: key by key, the command line overrides environment, file and default, in that order."""
    path = written(tmp_path, "[server]\nport = 1\nhost = 'a'\nlog_level = 'debug'\n")
    env = {"FOREDRAFT__SERVER__PORT": "2", "FOREDRAFT__SERVER__HOST": "b", "OTHER": "x"}
    config = load_config(path, ["server.port=3"], env)
    server = config.server
    assert (server.port, server.host, server.log_level) == (3, "b", "debug")
    assert server.max_restarts == 5


def test_empty_variable_is_unset() -> None:
    """Bug: compose files pass unset variables as empty strings."""
    assert load_config(None, [], {"FOREDRAFT__SERVER__PORT": ""}).server.port == 8000


@pytest.mark.parametrize("name", ["API_KEY", "ADMIN_KEY"])
def test_an_empty_key_does_not_turn_off_authentication(name: str) -> None:
    """Bug: with a secret mounted as an empty file, the server silently started without a key."""
    with pytest.raises(
        ConfigError, match=f"server.{name.lower()} is not allowed: a key must consist"
    ):
        load_config(None, [], {f"FOREDRAFT__SERVER__{name}": ""})


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="`tls_certificate` and `tls_key` are only used together"):
        load_config(None, ["server.tls_certificate=a.pem"])


@pytest.mark.parametrize("given", ["proxy.local", "10.0.0.1/8", ""])
def test_a_trusted_proxy_is_an_address(given: str) -> None:
    """Law: a host name is refused, because it would be trusted by whatever it resolves to."""
    with pytest.raises(ConfigError, match="a proxy is an address like"):
        load_config(None, [f"server.trusted_proxies=['{given}']"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("name", "name"),
        ('"two words"', "two words"),
        ("two words", "two words"),
        ("org/model-7b", "org/model-7b"),
        ("a=b", "a=b"),
        ('a"b', 'a"b'),
    ],
)
def test_values_are_toml_and_bare_words_are_strings(text: str, value: str) -> None:
    """Law: `--set` takes TOML values; anything that is not TOML is a string."""
    assert load_config(None, [f"server.served_model_name={text}"]).model_names[0] == value


def test_one_name_or_a_list_of_names() -> None:
    """Law: a list gives the model several names, without duplicates."""
    names = load_config(None, ['server.served_model_name=["a", "b", "a"]']).model_names
    assert names == ("a", "b")
    assert load_config(None, ["server.served_model_name=a"]).model_names == ("a",)
    assert load_config(None, []).model_names == ("foredraft-demo",)


def test_typed_values() -> None:
    """Law: booleans, numbers and inline tables keep their types."""
    config = load_config(
        None,
        [
            "cache.prefix_caching=false",
            "server.grace_seconds=2",
            "cache.memory_fraction=0.5",
            "speculation.controller={kind='fixed', k=2}",
        ],
    )
    assert config.engine.cache.prefix_caching is False
    assert config.server.grace_seconds == 2.0
    assert config.engine.cache.memory_fraction == 0.5
    assert config.engine.speculation.controller == FixedConfig(k=2)


def test_another_kind_replaces_the_table(tmp_path: Path) -> None:
    """Law: a later layer may change the kind, and no key of the earlier kind remains."""
    path = written(
        tmp_path,
        "[speculation.controller]\nkind='adaptive'\nk_max=3\n"
        "[speculation.proposer]\nkind='ngram'\nn_max=5\n",
    )
    spec = load_config(
        path, ["speculation.controller.k=2", "speculation.proposer.path=d"]
    ).engine.speculation
    assert spec.controller == FixedConfig(k=2)
    assert spec.proposer == DraftModelConfig(path="d")
    kept = load_config(path, ["speculation.proposer.n_min=3"]).engine.speculation
    assert kept.proposer == NgramConfig(n_max=5, n_min=3)
    assert kept.controller == AdaptiveConfig(k_max=3)


def test_default_kind_is_a_kind() -> None:
    """Bug: naming the default kind in a later layer dropped the keys set before."""
    overrides = ["speculation.proposer.dtype=float32", "speculation.proposer.kind=draft_model"]
    assert load_config(None, overrides).engine.speculation.proposer == DraftModelConfig(
        dtype="float32"
    )


def test_target_without_draft_gets_ngram_and_a_note() -> None:
    """Law: the built-in draft fits only the built-in target; a note names n-gram instead."""
    config = load_config(None, ["target.path=org/model-7b"])
    assert config.engine.speculation.proposer == NgramConfig()
    assert config.model_names[0] == "model-7b"
    assert "org/model-7b" in config.notes[0]
    named = load_config(None, ["target.path=t", "speculation.proposer.path=d"])
    assert named.engine.speculation.proposer == DraftModelConfig(path="d")
    assert named.notes == ()


def test_model_name_of_a_folder() -> None:
    """Law: the name is the last part of the path, without trailing slashes."""
    assert load_config(None, ["target.path=/models/tiny/"]).model_names[0] == "tiny"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("speculation.controller.k=99", ["speculation.controller.k = 99", "equal to 63"]),
        ("server.port=x", ["server.port = x", "integer"]),
        ("server.port=70000", ["server.port = 70000", "65535"]),
        ("server.port=true", ["server.port = True", "integer"]),
        ("speculation.controller.k=true", ["speculation.controller.k = True", "integer"]),
        ('speculation.controller.k="4"', ["speculation.controller.k = 4", "integer"]),
        ("cache.prefix_caching=1", ["cache.prefix_caching = 1", "boolean"]),
        ("cache.cpu_memory_gib=inf", ["cache.cpu_memory_gib = inf", "finite"]),
        ("server.prot=1", ["unknown key server.prot", "port", "did you mean port?"]),
        ("k=3", ["unknown key k", "speculation"]),
        ("speculation.proposer.kind=x", ["speculation.proposer.kind = x", "'ngram'"]),
        ("target=3", ["target = 3", "must be a table"]),
        ("server.grace_seconds=nan", ["server.grace_seconds = nan", "finite"]),
        ("server.log_level=loud", ["server.log_level = loud", "'debug'"]),
        ("device=tpu", ["device = tpu"]),
        (
            "speculation.proposer={kind='ngram', n_min=9, n_max=3}",
            ["n_min (9) must not exceed n_max (3)"],
        ),
        ("speculation.controller={kind='fixed', k_max=3}", ["unknown key", "kind fixed", "k"]),
        ("server.served_model_name=[]", ["server.served_model_name", "at least 1"]),
        ("server.served_model_name=['a', 3]", ["server.served_model_name.1 = 3", "string"]),
        ("server.served_model_name=''", ["server.served_model_name.0", "at least 1"]),
        ("server.served_model_name=3", ["server.served_model_name = 3", "list"]),
        ("served_model_name", ["--set served_model_name has no value"]),
        ("=3", ["--set =3 names no key"]),
        ("a..b=3", ["names no key"]),
    ],
)
def test_mistakes_name_key_given_and_allowed(override: str, parts: list[str]) -> None:
    """Law: the error is one sentence with the key, the given value and what is allowed."""
    sentence = refusal(override)
    for part in parts:
        assert part in sentence


def test_environment_mistakes_are_named() -> None:
    """Law: mistakes in the environment are refused as in a file."""
    assert "unknown key foo;" in refusal(env={"FOREDRAFT__FOO__BAR": "1"})
    assert "FOREDRAFT__" in refusal(env={"FOREDRAFT__": "1"})


def test_a_higher_layer_does_not_hide_a_value_in_place_of_a_table(tmp_path: Path) -> None:
    """Bug: `server = 5` passed unnoticed if --port was given."""
    path = written(tmp_path, "server = 5\n")
    with pytest.raises(ConfigError, match="server = 5 is not allowed: it must be a table"):
        load_config(path, ["server.port=1"])


@pytest.mark.parametrize("key", ["server.api_key", "server.admin_key"])
@pytest.mark.parametrize("value", ["12345678", '["s3cret"]'])
def test_the_key_is_never_shown(key: str, value: str) -> None:
    """Law: a key appears neither in an error nor in a repr."""
    sentence = refusal(f"{key}={value}")
    assert key in sentence
    assert "123" not in sentence
    assert "s3cret" not in sentence
    assert "s3cret" not in repr(load_config(None, [f"{key}=s3cret"]))


def test_long_values_are_cut() -> None:
    """Law: a long value does not make a long error."""
    assert len(refusal("server.port=" + "x" * 5000)) < 300


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Law: a missing file, a folder, bad TOML and bad UTF-8 are one-sentence errors as well."""
    assert "No such file" in refusal(path=tmp_path / "none.toml")
    assert "cannot read" in refusal(path=tmp_path)
    assert "not valid TOML" in refusal(path=written(tmp_path, "[server\n"))
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refusal(path=bad)


@pytest.mark.parametrize("text", ["speculation = 3", "[speculation]\ncontroller = 3", "target = 1"])
def test_tables_of_the_wrong_shape(tmp_path: Path, text: str) -> None:
    """Law: a value in place of a table is a one-sentence error, not a traceback."""
    assert "must be a table" in refusal(path=written(tmp_path, text))


MEDUSA = "[speculation.proposer]\nkind = 'medusa'\npath = 'demo'\n"


def test_a_key_that_the_kind_has_stays_with_it(tmp_path: Path) -> None:
    """Bug: `path` was read as a draft model's for every kind, so only the built-in heads could be
    used on top of a preset."""
    (tmp_path / "medusa.toml").write_text(MEDUSA)
    settings = ["speculation.proposer.path=heads", "speculation.proposer.heads=2"]
    found = load_config(tmp_path / "medusa.toml", settings).engine.speculation.proposer
    assert found == MedusaConfig(path="heads", heads=2)
    found = load_config(
        None, [*settings, "speculation.proposer.kind=medusa"]
    ).engine.speculation.proposer
    assert found == MedusaConfig(path="heads", heads=2)
    drafted = overrides_of({"speculation.proposer.path": "small"})
    found = load_config(tmp_path / "medusa.toml", drafted).engine.speculation.proposer
    assert found == DraftModelConfig(path="small")


@pytest.mark.parametrize(
    ("kind", "key", "of"),
    [
        ("lookahead", "choices=[[0]]", "medusa"),
        ("suffix", "n_max=4", "ngram"),
        ("draft_model", "heads=2", "medusa"),
        ("none", "window=3", "lookahead"),
    ],
)
def test_a_key_of_another_kind_is_refused(kind: str, key: str, of: str) -> None:
    """Bug: the key silently selected another proposer than the one that was named."""
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"speculation.proposer.{key}", f"speculation.proposer.kind={kind}"])
    name = key.partition("=")[0]
    problem = f"speculation.proposer.{name} is a key of the kind {of!r}, but the kind is {kind!r}"
    assert problem in str(refused.value)


@pytest.mark.parametrize("key", ["server.api_key", "server.admin_key"])
def test_a_mounted_secret_keeps_no_line_end(key: str) -> None:
    """Bug: a key from a file kept its line end, so no client could send it."""
    name = key.partition(".")[2]
    environment = {f"FOREDRAFT__SERVER__{name.upper()}": " s3cret\n"}
    assert getattr(load_config(None, [], environment).server, name) == "s3cret"


@pytest.mark.parametrize("bad", ["a\nb", "schl\u00fcssel", "\u2028", " "])
def test_a_key_that_no_header_can_hold_is_refused(bad: str) -> None:
    """Law: the server refuses the key at the start, without showing it."""
    with pytest.raises(ConfigError, match=r"server.api_key .*ASCII") as error:
        load_config(None, [f"server.api_key={json.dumps(bad)}"])
    assert bad.strip() == "" or bad not in str(error.value)


@pytest.mark.parametrize("bad", ["app.example", "https://app.example/", "https://"])
def test_an_origin_has_a_scheme_and_no_path(bad: str) -> None:
    """Law: an origin is written as browsers send it, since the two are compared for equality."""
    with pytest.raises(ConfigError, match="https://app.example:8443"):
        load_config(None, [f'server.cors_origins=["{bad}"]'])


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ('[[server]]\napi_key = "sk-canary"\n', None),
        ('[server]\napi_key = "sk-canary"\n', "server.api_key.x=1"),
    ],
)
def test_no_secret_is_shown_where_a_table_is_wrong(
    tmp_path: Path, text: str, override: str | None
) -> None:
    """Bug: the error quoted the whole wrong table, including a key."""
    path = tmp_path / "foredraft.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not allowed") as error:
        load_config(path, [override] if override else [])
    assert "canary" not in str(error.value)
