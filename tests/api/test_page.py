"""The page's files: what a browser gets, and the policy that it enforces on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.api.pages import FOLDER, files
from tests.support.serving import Served, serve

FILES = files()
KEY = "sk-secret"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(api_key=KEY) as served:
        yield served


@pytest.mark.parametrize("path", FILES)
def test_files_are_served_without_a_key(served: Served, path: str) -> None:
    """Law: files are served unchanged, with their types, under a policy that allows this server
    only, and are sent again only if they changed."""
    reply = httpx.get(served.url + path)
    assert reply.status_code == 200
    assert reply.content == FILES[path].read_bytes()
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    name = {"/": "index.html", "/docs": "docs.html"}.get(path, path)
    assert reply.headers["content-type"].startswith(kind[name.rpartition(".")[2]])
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    again = httpx.get(served.url + path, headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    zipped = {"if-none-match": f'"another", W/{reply.headers["etag"]}'}  # as proxies rewrite it
    assert httpx.get(served.url + path, headers=zipped).status_code == 304
    anything = httpx.get(served.url + path, headers={"if-none-match": "*"})
    assert anything.status_code == 304
    other = httpx.get(served.url + path, headers={"if-none-match": '"another"'})
    assert other.status_code == 200


def test_every_file_of_the_folder_has_a_type() -> None:
    """Law: every file in the folder is served."""
    assert len(FILES) == len(list(FOLDER.iterdir()))


def test_files_name_only_each_other() -> None:
    """Law: no other host and no absolute path, so the page works offline and behind a prefix; no
    markup built from text; nothing inline, which the policy would block."""
    known = {path.removeprefix("/") for path in FILES} | {"openapi.json"}
    for file in FILES.values():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//[a-z]", text) == [], file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        if file.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
            named = re.findall(r'(?:src|href)="([^"#]*)', text)
            assert {name for name in named if name not in ("", "./")} <= known, file.name
        imported = re.findall(r'from "\./(.*?)"|^import "\./(.*?)"', text, re.MULTILINE)
        assert {f"page/{one or other}" for one, other in imported} <= known, file.name


def test_the_old_address_leads_to_the_view(served: Served) -> None:
    """Law: the redirect is relative, so it also works behind a prefix."""
    reply = httpx.get(f"{served.url}/speculation/live")
    assert (reply.status_code, reply.headers["location"]) == (307, "../#live")


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/../config.py", "/docs/"])
def test_other_paths_are_no_files(path: str) -> None:
    with serve() as served:
        reply = httpx.get(served.url + path)
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "unknown_route"


@pytest.mark.parametrize(("settings", "status"), [({}, 404), ({"api_key": KEY}, 401)])
def test_the_page_can_be_disabled(settings: dict[str, Any], status: int) -> None:
    """Law: with `server.page` false its paths behave like unknown paths."""
    with serve(page=False, **settings) as served:
        for path in (*FILES, "/speculation/live"):
            assert httpx.get(served.url + path).status_code == status
        keyed = httpx.get(served.url, headers={"authorization": f"Bearer {KEY}"})
        assert keyed.status_code == 404


def test_the_live_view_reads_what_exists(served: Served) -> None:
    """Law: the metrics and the fields of GET /speculation that it reads exist."""
    metrics = httpx.get(f"{served.url}/metrics").text
    source = (FOLDER / "metrics.js").read_text() + (FOLDER / "live.js").read_text()
    names = re.findall(r'(?:grown|grownBy|total|by)\("(\w+)"', source)
    assert len(names) > 6
    for name in names:
        assert re.search(rf"^foredraft_{name}[{{ ]", metrics, re.MULTILINE), name
    known = httpx.get(f"{served.url}/speculation", headers={"authorization": f"Bearer {KEY}"})
    used = set(re.findall(r"now\.(\w+)", (FOLDER / "live.js").read_text()))
    assert {"explanation", "mode", "k_max"} <= used <= known.json().keys()
