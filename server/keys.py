"""API keys: their names, limits and usage.

A key file (`server.api_keys_file`) holds digests only and is read again on SIGHUP.
`server.api_key` is the key named "default", `server.admin_key` the one named "admin". A client's
key is compared with all digests, each in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from engine.config import BaseConfig
from engine.errors import ConfigError
from server.config import ServerConfig, explain

DEFAULT, ADMIN = "default", "admin"
RESERVED = {DEFAULT: "server.api_key", ADMIN: "server.admin_key"}  # name -> setting
MINUTE = 60.0

Name = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")]


class KeyRow(BaseConfig):
    """One key of the file. Limits apply to all requests of the key together; None: no limit."""

    name: Name
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)  # of prompts and replies
    concurrency: int | None = Field(None, ge=1)  # requests at a time
    weight: float = Field(1.0, ge=0.01, le=100)  # its share if keys compete
    priority: bool = False  # whether its requests may set `priority`
    own_cache: bool = False  # whether no other key shares its cached prompts


class TokenBucket:
    """Holds at most `per_minute`, refilled evenly. Spending may take it below zero;
    requests are then refused until it is positive again."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left, self._at = float(per_minute), clock()

    @property
    def left(self) -> float:
        now = self._clock()
        earned = (now - self._at) * self.per_minute / MINUTE
        self._left, self._at = min(self._left + earned, float(self.per_minute)), now
        return self._left

    def spend(self, count: float) -> None:
        self._left = self.left - count

    def seconds_until(self, count: float) -> float:
        """Return the seconds until `count` are left."""
        return max(count - self.left, 0.0) * MINUTE / self.per_minute


class Tenant:
    """The holder of a key; lives as long as the server. `row`: as last read from the file."""

    def __init__(self, row: KeyRow, *, may_prioritise: bool, clock: Callable[[], float]) -> None:
        self.name = row.name
        self.running = 0  # requests
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self.set(row, may_prioritise=may_prioritise)

    def set(self, row: KeyRow, *, may_prioritise: bool) -> None:
        """Apply new limits. Usage is kept for a limit that is unchanged."""
        self.row, self.may_prioritise = row, may_prioritise
        limits = {"requests": row.requests_per_minute, "tokens": row.tokens_per_minute}
        before, self._buckets = self._buckets, {}
        for what, limit in limits.items():
            if limit is not None:
                known = before.get(what)
                same = known is not None and known.per_minute == limit
                self._buckets[what] = known if same and known else TokenBucket(limit, self._clock)

    def refusal(self) -> tuple[str, float] | None:
        """Return (reason, seconds to wait) if it may not send a request now, else None."""
        most = self.row.concurrency
        if most is not None and self.running >= most:
            return f"the key `{self.name}` allows {most} requests at a time, and as many run", 1.0
        for what, bucket in self._buckets.items():
            if bucket.left < 1:
                text = f"has {bucket.per_minute} {what} a minute, and they are used up"
                return f"the key `{self.name}` {text}", bucket.seconds_until(1)
        return None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one running request."""
        self.running += 1
        self.spend(1, "requests")
        try:
            yield
        finally:
            self.running -= 1

    def spend(self, count: int, what: str = "tokens") -> None:
        """Charge a request, prompt tokens, or reply tokens as they arrive."""
        if (bucket := self._buckets.get(what)) is not None:
            bucket.spend(count)

    def salt(self, requested: str) -> str:
        """Return the prefix-cache salt; with `own_cache` it holds the digest, known to no other."""
        return f"{self.row.sha256}:{requested}" if self.row.own_cache else requested

    @property
    def headers(self) -> dict[str, str]:
        """The limits and what remains of them, as OpenAI's `x-ratelimit-*` headers."""
        headers: dict[str, str] = {}
        for what, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(int(bucket.left), 0))
            seconds = bucket.seconds_until(bucket.per_minute)
            headers[f"x-ratelimit-reset-{what}"] = f"{seconds:.3f}s"
        return headers


class Keyring:
    """All keys. Raises ConfigError if the key file is unusable."""

    def __init__(
        self, server: ServerConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._clock = clock
        self._known: dict[str, Tenant] = {}  # by name: all tenants since the start
        self._tenants: dict[bytes, Tenant] = {}  # by digest: the current ones
        nobody, may = KeyRow(name="anyone", sha256="0" * 64), server.allow_priority
        self.anyone = Tenant(nobody, may_prioritise=may, clock=clock)  # used if no key is needed
        self.reload()

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return self._server.api_key is None and self._server.api_keys_file is None

    @property
    def may_prioritise(self) -> bool:
        """Whether any key may set `priority`."""
        tenants = [self.anyone] if self.is_open else self._tenants.values()
        return any(tenant.may_prioritise for tenant in tenants)

    def reload(self) -> int:
        """Read the file again and return the number of keys. A tenant whose name was ever known
        keeps its running requests and usage. Raises ConfigError, and then nothing changes."""
        server, rows = self._server, list[KeyRow]()
        for name, key in ((DEFAULT, server.api_key), (ADMIN, server.admin_key)):
            if key is not None:
                rows.append(KeyRow(name=name, sha256=digest_of(key).hex()))
        if server.api_keys_file is not None:
            rows += read_keys(Path(server.api_keys_file))
        whose: dict[str, str] = {}
        for row in rows:
            owner = RESERVED.get(row.name, f"`{row.name}` of {server.api_keys_file}")
            if (other := whose.setdefault(row.sha256, owner)) != owner:
                raise ConfigError(f"{other} and {owner} are the same key: each must have its own")
        self._tenants = {bytes.fromhex(row.sha256): self._tenant(row) for row in rows}
        return len(rows)

    def find(self, key: str) -> Tenant | None:
        """Return the tenant of `key`, as given in the header; None if there is none."""
        given, match = hashlib.sha256(key.encode("latin-1")).digest(), None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(given, digest):
                match = tenant
        return match

    def _tenant(self, row: KeyRow) -> Tenant:
        may = row.priority or self._server.allow_priority
        new = Tenant(row, may_prioritise=may, clock=self._clock)
        tenant = self._known.setdefault(row.name, new)
        tenant.set(row, may_prioritise=may)
        return tenant


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("ascii")).digest()


def read_keys(path: Path) -> list[KeyRow]:
    """Return the keys of a file, at least one. Raises ConfigError."""
    try:
        data: Mapping[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the keys {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):  # their messages may quote a line
        raise ConfigError(f"the keys {path} are not valid TOML") from None
    tables = data.get("key", [])
    if data.keys() - {"key"} or not isinstance(tables, list):
        raise ConfigError(f"the keys {path} must be tables [[key]] and nothing else")
    if not tables:
        raise ConfigError(f"the keys {path} have no table [[key]]; was the file truncated?")
    rows = [_row(table, f"the keys {path}, number {i}") for i, table in enumerate(tables, 1)]
    names = [*RESERVED, *(row.name for row in rows)]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ConfigError(f"the keys {path}: a name `{twice}` is there twice, or reserved")
    return rows


def _row(table: Any, where: str) -> KeyRow:
    try:
        return KeyRow.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, KeyRow, table, hide=True)}") from None


def new_key(name: str) -> tuple[str, str]:
    """Return a new key and its lines for the key file. Raises ConfigError for an invalid name."""
    if name in RESERVED:
        raise ConfigError(f"name = {name} is not allowed: it is reserved for {RESERVED[name]}")
    key = f"fd-{secrets.token_urlsafe(32)}"
    try:
        row = KeyRow(name=name, sha256=digest_of(key).hex())
    except ValidationError as error:
        raise ConfigError(explain(error, KeyRow, {"name": name})) from None
    return key, f'[[key]]\nname = "{row.name}"\nsha256 = "{row.sha256}"\n'
