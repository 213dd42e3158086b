"""API keys and their limits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.engine.admission import Admission, Charge
from server.errors import QueueFull
from server.keys import Keyring, KeyRow, Tenant, new_key
from tests.support.fake_client import FakeClient


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def row(name: str, key: str, more: str = "") -> str:
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest(key)}"\n{more}\n'


def ring(tmp_path: Path, text: str, clock: Clock | None = None, **server: object) -> Keyring:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    config = ServerConfig(api_keys_file=str(path), **server)  # type: ignore[arg-type]
    return Keyring(config, clock=clock or Clock())


def found(keyring: Keyring, key: str) -> Tenant:
    tenant = keyring.find(key)
    assert tenant is not None
    return tenant


def test_a_key_is_found_by_its_digest(tmp_path: Path) -> None:
    """Law: the keys of the file and the two of the configuration are found, and no others."""
    keyring = ring(tmp_path, row("a", "one") + row("b", "two"), api_key="sk", admin_key="root")
    names = [found(keyring, key).name for key in ("one", "two", "sk", "root")]
    assert names == ["a", "b", "default", "admin"]
    for wrong in ("", "on", "one ", "default", digest("one"), "schl\xfcssel"):
        assert keyring.find(wrong) is None


def test_a_new_key_works_with_the_lines_printed_for_it(tmp_path: Path) -> None:
    """Law: what `foredraft key` prints suffices for the key to work; no two keys are equal."""
    (first, lines), (second, more) = new_key("team-a"), new_key("team-b")
    keyring = ring(tmp_path, lines + more)
    assert [found(keyring, key).name for key in (first, second)] == ["team-a", "team-b"]
    assert first not in lines
    for name, allowed in (
        ("a b", "it must match"),
        ("default", "it is reserved for server.api_key"),
        ("admin", "it is reserved for server.admin_key"),
    ):
        with pytest.raises(ConfigError, match=f"name = {name} is not allowed: {allowed}"):
            new_key(name)


BAD = {
    "no digest": '[[key]]\nname = "a"\n',
    "a key in the open": '[[key]]\nname = "a"\nsha256 = "sk-very-secret"\n',
    "a key for its digest": '[[key]]\nname = "a"\nkey = "fd-secret"\n',
    "a key that is a row": 'key = ["fd-secret"]',
    "a key that is a name": row("a b fd-secret", "k"),
    "a key for a limit": row("a", "k", 'weight = "fd-secret"'),
    "a key for a kind": row("a", "k", 'kind = "fd-secret"'),
    "an unknown limit": row("a", "k", "rpm = 3"),
    "a limit of nothing": row("a", "k", "concurrency = 0"),
    "a name twice": row("a", "k") + row("a", "l"),
    "a reserved name": row("admin", "k"),
    "a key twice": row("a", "k") + row("b", "k"),
    "no TOML": "sk-very-secret",
    "no keys": "# cut off",
}


@pytest.mark.parametrize("fault", BAD)
def test_a_wrong_file_is_one_sentence_without_its_keys(tmp_path: Path, fault: str) -> None:
    """Law: the whole file is refused; the error names the file and does not quote it."""
    with pytest.raises(ConfigError, match="keys.toml") as caught:
        ring(tmp_path, BAD[fault])
    assert "secret" not in str(caught.value)
    assert digest("k") not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "problem"),
    {
        "a key for its digest": "number 2: sha256 is missing",
        "a key for a limit": "number 2: weight = (hidden) is not allowed: it must be a",
        "an unknown limit": "number 2: unknown key rpm; the top level knows name, sha256,",
        "no keys": "keys.toml have no table [[key]]; was the file truncated?",
    }.items(),
)
def test_a_wrong_row_is_named_with_its_field(tmp_path: Path, fault: str, problem: str) -> None:
    """Bug: an error about a row without a digest quoted the whole row, including a key in it."""
    with pytest.raises(ConfigError) as caught:
        ring(tmp_path, row("before", "b") + BAD[fault] if "number" in problem else BAD[fault])
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "server", "names"),
    [
        (row("a", "sk"), {"api_key": "sk"}, "server.api_key and `a` of"),
        (row("a", "sk"), {"admin_key": "sk"}, "server.admin_key and `a` of"),
        (
            row("a", "k"),
            {"api_key": "sk", "admin_key": "sk"},
            "server.api_key and server.admin_key",
        ),
        (row("a", "k") + row("b", "k"), {}, "`a` of .*keys.toml and `b` of"),
    ],
)
def test_one_key_with_two_names_is_refused(
    tmp_path: Path, text: str, server: Mapping[str, str], names: str
) -> None:
    """Bug: a key that was both a client's and the admin key was taken for either, depending on the
    order. Law: it is refused at the start and when the file is reloaded."""
    with pytest.raises(ConfigError, match=f"{names} .*are the same key"):
        ring(tmp_path, text, Clock(), **server)


def test_api_key_and_admin_key_differ() -> None:
    with pytest.raises(ConfigError, match="server.api_key and server.admin_key are the same key"):
        Keyring(ServerConfig(api_key="sk", admin_key="sk"))


@pytest.mark.parametrize("text", [row("a", "sk"), row("a", "k") + row("b", "k"), ""])
def test_a_refused_reload_changes_nothing(tmp_path: Path, text: str) -> None:
    """Bug: a SIGHUP while the file was truncated locked out all clients."""
    keyring = ring(tmp_path, row("first", "one"), admin_key="sk")
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError):
        keyring.reload()
    assert [found(keyring, key).name for key in ("one", "sk")] == ["first", "admin"]


def test_a_tenant_that_returns_has_its_used_limits(tmp_path: Path) -> None:
    """Bug: a tenant missing in one reload got fresh limits with the next."""
    keyring = ring(tmp_path, row("a", "one", "tokens_per_minute = 100\nconcurrency = 1"))
    path, tenant = tmp_path / "keys.toml", found(keyring, "one")
    before = path.read_text()
    with tenant.request():
        tenant.spend(100)
        path.write_text(row("b", "two"))
        keyring.reload()
        assert keyring.find("one") is None
        path.write_text(before)
        keyring.reload()
        assert found(keyring, "one").running == 1
    reason, _ = found(keyring, "one").refusal() or ("", 0.0)
    assert "100 tokens a minute" in reason


def test_a_file_is_reloaded_whole_or_not_at_all(tmp_path: Path) -> None:
    """Law: keys come and go; a tenant that stays keeps its running requests and used limits; an
    invalid file changes nothing."""
    keyring = ring(tmp_path, row("a", "one", "tokens_per_minute = 100") + row("b", "two"))
    tenant = found(keyring, "one")
    tenant.spend(100)
    with tenant.request():
        (tmp_path / "keys.toml").write_text(row("a", "new", "tokens_per_minute = 100"))
        assert keyring.reload() == 1
        assert keyring.find("one") is keyring.find("two") is None
        assert found(keyring, "new") is tenant
        assert tenant.running == 1
        assert tenant.refusal() is not None
        (tmp_path / "keys.toml").write_text("nonsense")
        with pytest.raises(ConfigError):
            keyring.reload()
        assert found(keyring, "new") is tenant


def tenant_of(clock: Clock, **limits: object) -> Tenant:
    row = KeyRow(name="a", sha256="0" * 64, **limits)  # type: ignore[arg-type]
    return Tenant(row, may_prioritise=False, clock=clock)


def test_requests_per_minute_are_refilled_evenly() -> None:
    """Law: as many requests as the limit may start at once, then one every (60 / limit) seconds;
    error and headers say how long to wait."""
    clock = Clock()
    tenant = tenant_of(clock, requests_per_minute=30)
    for _ in range(30):
        assert tenant.refusal() is None
        with tenant.request():
            pass
    reason, seconds = tenant.refusal() or ("", 0.0)
    assert "30 requests a minute" in reason
    assert seconds == pytest.approx(2.0)
    assert tenant.headers == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
    }
    clock.now += 2.0
    assert tenant.refusal() is None


def test_excess_tokens_are_paid_by_waiting() -> None:
    """Law: no prompt is too long for a limit, and the limit holds on average: after 250 tokens at
    100 a minute, requests wait until they are earned."""
    clock = Clock()
    tenant = tenant_of(clock, tokens_per_minute=100)
    assert tenant.refusal() is None
    tenant.spend(250)
    reason, seconds = tenant.refusal() or ("", 0.0)
    assert "100 tokens a minute" in reason
    assert seconds == pytest.approx(151 * 0.6)
    clock.now += seconds + 0.01
    assert tenant.refusal() is None


def test_requests_at_a_time() -> None:
    tenant = tenant_of(Clock(), concurrency=2)
    with tenant.request():
        with tenant.request():
            reason, _ = tenant.refusal() or ("", 0.0)
            assert "2 requests at a time" in reason
        assert tenant.refusal() is None


def test_no_client_can_name_the_salt_of_another_key() -> None:
    """Law: with own_cache, equal salts differ between keys; otherwise a salt is used as sent."""
    shared = tenant_of(Clock())
    rows = [KeyRow(name="a", sha256=digest(key), own_cache=True) for key in "kl"]
    own = [Tenant(row, may_prioritise=False, clock=Clock()) for row in rows]
    assert shared.salt("x") == "x"
    assert len({shared.salt("x"), own[0].salt("x"), own[1].salt("x"), own[0].salt("y")}) == 4


def test_prompt_tokens_count_as_waiting_until_the_first_token() -> None:
    """Law: above the bound requests get 429, except one alone, whatever its length; prompt tokens
    no longer count after the first generated token or the end of the request."""
    admission = Admission(FakeClient(), 100, max_waiting_tokens=50)
    admission.check_tokens(1000)
    long, short = (
        Charge(admission, tenant_of(Clock()), 40),
        Charge(admission, tenant_of(Clock()), 5),
    )
    admission.check_tokens(5)
    with pytest.raises(
        QueueFull, match="45 prompt tokens are waiting and this request has 6; at most 50"
    ):
        admission.check_tokens(6)
    long.tokens(1)
    long.tokens(1)
    assert admission.waiting_tokens == 5
    short.end()
    long.end()
    assert admission.waiting_tokens == 0


def test_retry_after_follows_the_measured_rate() -> None:
    """Law: Retry-After is the excess of tokens divided by the engine's recent rate; idle time does
    not count, and a slower engine is noticed."""
    pace = [0.0, 0.0, 0.0]
    admission = Admission(
        FakeClient(), 100, max_waiting_tokens=50, pace=lambda: (pace[0], pace[1], pace[2])
    )
    Charge(admission, tenant_of(Clock()), 50)

    def retry_seconds(count: int) -> float | None:
        with pytest.raises(QueueFull) as caught:
            admission.check_tokens(count)
        return caught.value.retry_seconds

    assert retry_seconds(100) is None
    pace[:] = [2000.0, 10.0, 20.0]
    assert retry_seconds(300) == pytest.approx(3.0)
    for _ in range(3):
        pace[0] += 200.0
        pace[2] += 20.0
        assert retry_seconds(100) is not None
    assert retry_seconds(100) == pytest.approx(10.0)
