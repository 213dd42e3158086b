"""The page in a headless browser, on the real engine with the built-in pair.

It needs Chromium (`apt-get install chromium`) and playwright (`pip install 'foredraft[browser]'`);
the accessibility tests also need axe-core (`npm install axe-core` here, or its `axe.min.js` named
by AXE_CORE).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.served import ROOT, SCRIPTED, Server, serving
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.scripted import Script
from tests.support.serving import serve
from tests.support.tools import scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
AXE = Path(os.environ.get("AXE_CORE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]

ADMIN = "operator"
PAIR = (
    sys.executable, "-m", "server", "serve", "--port", "0", "--set", f"server.admin_key={ADMIN}",
    "--set", "server.resume_seconds=600",
)  # fmt: skip
PATIENCE = 120_000  # milliseconds, for a machine that is busy
VIEWS = ("chat", "race", "live")


@contextmanager
def started(command: Sequence[str], environment: Any) -> Iterator[Server]:
    with asyncio.Runner() as runner:
        context = serving(command, environment)
        server = runner.run(context.__aenter__())
        yield server
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    with started(PAIR, os.environ) as server:
        yield server


@pytest.fixture(scope="module")
def browser(pair: Server) -> Iterator[Any]:
    expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A tab, what its console complained of, and the URLs that it requested."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url.rstrip("/")
        self.page = browser.new_context(
            viewport={"width": 1280, "height": 900}, **options
        ).new_page()
        self.page.set_default_timeout(PATIENCE)
        self.complaints: list[str] = []
        self.urls: set[str] = set()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.urls.add(request.url))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, view: str) -> Any:
        self.page.goto(f"{self.url}/#{view}")
        expect(self.page.locator(f"#view-{view}")).to_be_visible()
        expect(self.page.locator("#model")).to_have_text("foredraft-demo")
        return self.page


@pytest.fixture
def visit(browser: Any, pair: Server) -> Iterator[Tab]:
    """Law: in every test with it, the console shows no error and no other host is asked."""
    visit = Tab(browser, str(pair.http.base_url))
    yield visit
    visit.page.context.close()
    assert visit.complaints == []
    assert {url for url in visit.urls if not url.startswith(visit.url)} == set()


def switch(page: Any, mode: str) -> None:
    """Switch by the live view's own form."""
    page.fill("#admin-key", ADMIN)
    page.fill("#fix", "4")
    page.click(f"#switch-{mode}")
    expect(page.locator(f"#switch-{mode}")).to_have_attribute("aria-pressed", "true")


def say(page: Any, text: str, nth: int = 0) -> Any:
    """Send a message, and return the reply's turn once it has ended."""
    page.fill("#say", text)
    page.press("#say", "Enter")
    turn = page.locator(".turn.assistant").nth(nth)
    expect(turn.locator(".facts")).to_contain_text("seed")
    return turn


def complete(visit: Tab, **fields: Any) -> Any:
    body = {"model": "foredraft-demo", "return_token_ids": True, **fields}
    return httpx.post(f"{visit.url}/v1/completions", json=body, timeout=120).json()


def test_a_chat_streams_and_its_tokens_have_colours(visit: Tab) -> None:
    """Law: the text equals the API's; each token has its proposer's colour, and the legend counts
    them all."""
    page = visit.open("live")
    switch(page, "fixed")  # so that there are draft tokens, however busy the machine is
    visit.open("chat")
    turn = say(page, "What is the capital of France?")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "foredraft-demo", "messages": messages, "temperature": 0}
    reply = httpx.post(f"{visit.url}/v1/chat/completions", json=body, timeout=120).json()
    assert turn.locator(".text").inner_text() == reply["choices"][0]["message"]["content"]
    tokens = turn.locator(".token")
    counts = [int(count) for count in turn.locator(".legend b").all_inner_texts()]
    assert sum(counts) == tokens.count() == reply["usage"]["completion_tokens"] - 1  # its end token
    colours = tokens.evaluate_all(
        "all => all.map(t => [t.className, getComputedStyle(t).backgroundColor])"
    )
    by_source = dict(colours)
    assert {tuple(each) for each in colours} == set(by_source.items())
    assert len(by_source) == len(counts) > 1
    assert len(set(by_source.values())) == len(by_source)
    visit.open("live")
    switch(page, "auto")


def test_a_reply_can_be_stopped_and_continued(visit: Tab) -> None:
    """Law: tokens appear while the reply comes, and the text shown is the text continued."""
    page = visit.open("chat")
    page.check("#mode-completion")
    page.fill("#max-tokens", "2000")
    page.fill("#temperature", "1")
    page.fill("#say", "Once upon a time")
    page.route("**/v1/completions", endless)
    page.press("#say", "Control+Enter")
    page.locator(".turn.coming .token").first.wait_for(state="attached")  # may be a line break
    page.click("#stop")
    turn = page.locator(".turn")
    expect(turn.locator(".facts")).to_contain_text("stopped")
    shown = turn.locator(".text").inner_text()
    assert shown.startswith("Once upon a time")
    page.unroute("**/v1/completions")
    page.fill("#max-tokens", "8")
    with page.expect_request("**/v1/completions") as request_info:
        turn.get_by_role("button", name="Continue").click()
    assert request_info.value.post_data_json["prompt"].strip() == shown.strip()
    expect(turn.locator(".facts")).to_contain_text("seed")


def endless(route: Any) -> None:
    """Send the request unchanged, except that the model cannot end it."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_thinking_stands_above_the_answer(browser: Any, pair: Server, scheme: str) -> None:
    """Law: it is shown while it comes, folded when the answer begins, and opened by keyboard; none
    of its tokens is in the answer, whatever the tokens per step, and all are counted."""
    gate = asyncio.Semaphore(0)
    text = "<think>\nThe boot? Rome.\n</think>\n\nIt is Rome."
    client = scripted(text, tokens_per_step=3, gate=gate)
    tokenizer = ByteTokenizer(thinks="<think></think>")
    with serve(client, tokenizer=tokenizer, served_model_name="foredraft-demo") as served:
        visit = Tab(browser, served.url, color_scheme=scheme)
        page = visit.open("chat")
        page.fill("#say", "What is the capital of Italy?")
        page.press("#say", "Enter")
        turn = page.locator(".turn.assistant")
        thought, answer = turn.locator(".thought > div"), turn.locator(".text")
        expect(turn).to_have_class(re.compile("coming"))
        expect(thought).to_be_hidden()
        for _ in range(6):
            served.call(gate.release)
        expect(thought).to_have_text(re.compile("The boot"))
        expect(thought).to_be_visible()
        expect(answer).to_be_empty()
        for _ in range(len(text)):
            served.call(gate.release)
        expect(turn.locator(".facts")).to_contain_text("seed")
        assert answer.inner_text() == "It is Rome."
        expect(thought).to_be_hidden()
        turn.locator(".thought summary").press("Enter")
        expect(thought).to_be_visible()
        assert thought.text_content() == text.removesuffix("It is Rome.")
        counts = [int(count) for count in turn.locator(".legend b").all_inner_texts()]
        assert sum(counts) == turn.locator(".token").count() == len(text)
        if AXE.exists():
            assert violations(page) == []
        page.context.close()
    assert visit.complaints == []


def test_a_message_is_edited_and_the_chat_continues(visit: Tab) -> None:
    """Law: later turns are removed, and the model gets only the new text."""
    page = visit.open("chat")
    say(page, "What is the capital of France?")
    say(page, "What is the capital of Italy?", nth=1)
    page.locator(".turn.user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited text").fill("What is the capital of Spain?")
    with page.expect_request("**/v1/chat/completions") as request_info:
        page.get_by_role("button", name="Continue from here").click()
    messages = request_info.value.post_data_json["messages"]
    assert messages == [{"role": "user", "content": "What is the capital of Spain?"}]
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".turn.assistant .facts")).to_contain_text("seed")


def test_a_schema_is_honoured_and_a_bad_one_is_reported(visit: Tab) -> None:
    page = visit.open("chat")
    page.fill("#schema", "{")
    page.fill("#say", "Bob is 7.")
    page.press("#say", "Enter")
    expect(page.locator("#schema-problem")).to_contain_text("This is not valid JSON")
    expect(page.locator(".turn")).to_have_count(0)
    properties = {"age": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": ["age"]}
    page.fill("#schema", json.dumps({**schema, "additionalProperties": False}))
    turn = say(page, "Bob is 7.")
    assert json.loads(turn.locator(".text").inner_text()).keys() == {"age"}


@pytest.mark.parametrize("result", ["sunny", ""])
def test_tools_are_shown_as_calls_and_answered(visit: Tab, result: str) -> None:
    """Law: what the reader enters goes back to the model as the result of that call. Bug: an empty
    result was left out of the conversation."""
    page = visit.open("chat")
    function = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    page.fill("#tools", json.dumps([{"type": "function", "function": function}]))
    turn = say(page, "What is the weather in Rome?")
    expect(turn.locator(".call b")).to_have_text("get_weather")
    turn.get_by_label("Result of get_weather").fill(result)
    with page.expect_request("**/v1/chat/completions") as request_info:
        turn.get_by_role("button", name="Send results").click()
    messages = request_info.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert messages[2]["content"] == result
    expect(page.locator(".turn.assistant .facts").nth(1)).to_contain_text("seed")


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_race_ends_with_no_token_that_differs(visit: Tab, temperature: int) -> None:
    """Law: ids are compared; both replies equal the API's for this seed."""
    page = visit.open("race")
    page.fill("#race-temperature", str(temperature))
    page.fill("#race-seed", "5")
    prompt = page.input_value("#race-prompt")
    reply = complete(visit, prompt=prompt, temperature=temperature, seed=5, max_tokens=200)
    count = len(reply["choices"][0]["token_ids"])
    for _ in range(2):  # either order
        page.click("#race-start")
        expect(page.locator("#race-result")).to_contain_text("differ")
        assert page.inner_text("#race-result").startswith(f"0 of {count} tokens differ")
        for lane in ("plain", "speculative"):
            text = page.locator(f"#lane-{lane} .text").text_content()
            assert text == reply["choices"][0]["text"]
            assert float(page.locator(f"#lane-{lane} .number").text_content()) > 0
        assert page.locator("#lane-plain .token:not(.by-target)").count() == 0


def test_a_race_counts_what_differs(visit: Tab) -> None:
    """Law: it compares by position, and counts the tokens that one reply has more."""
    page = visit.open("race")
    verdict = page.evaluate(
        """async () => {
        const { verdict } = await import("./page/race.js");
        const usage = { speculation: { proposed: 4, accepted: 2 } };
        return verdict({ ids: [1, 2, 3, 4], end: 2, usage }, { ids: [1, 9, 3], end: 0.5, usage });
        }"""
    )
    assert verdict[0].startswith("2 of 4 tokens differ · 3.00×")
    assert "number 2" in verdict[1]


def test_a_race_that_was_stopped_has_no_replay(visit: Tab) -> None:
    """Bug: its replay left the page busy for good; and after a replay, the note on how runs are
    measured was still about that."""
    page = visit.open("race")
    page.click("#race-start")
    page.click("#race-again")
    expect(page.locator("#race-how")).to_contain_text("Replay of the measured replies")
    expect(page.locator("#race-start")).to_be_visible()
    page.fill("#race-tokens", "1500")
    page.click("#race-start")
    expect(page.locator("#race-how")).to_contain_text("one after the other")
    page.click("#race-stop")
    expect(page.locator("#race-result")).to_have_text("Stopped.")
    expect(page.locator("#race-start")).to_be_visible()
    expect(page.locator("#race-again")).to_be_hidden()


def test_the_live_view_agrees_with_the_metrics(visit: Tab) -> None:
    """Law: K and tokens/s equal those of /metrics over the same time, within 5 %."""
    scrapes: list[tuple[float, str]] = []  # time and text of each /metrics that it read

    def on_metrics(response: Any) -> None:
        if response.url.endswith("/metrics"):
            scrapes.append((time.monotonic(), response.text()))

    visit.page.on("response", on_metrics)
    page = visit.open("live")
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            complete(visit, prompt="def f(n):\n", max_tokens=100, ignore_eos=True)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        for _ in range(3):
            page.wait_for_timeout(5_000)
            now = page.evaluate(
                """() => ({ ...document.getElementById("now").dataset,
                tokens: document.getElementById("now-tokens").textContent,
                k: document.getElementById("now-k").textContent })"""
            )
            first, last = scrapes[int(now["from"])], scrapes[int(now["to"])]
            grown = counted(last[1]).items()
            grown_by = {name: value - counted(first[1])[name] for name, value in grown}
            speed = grown_by.pop("tokens") / (last[0] - first[0])
            rounds = sum(grown_by.values())
            k = sum(int(k) * count for k, count in grown_by.items()) / rounds
            assert float(now["tokens"]) == pytest.approx(speed, rel=0.05)
            assert float(now["k"]) == pytest.approx(k, rel=0.05, abs=0.005)
            assert speed > 0
    finally:
        over.set()
        loading.join()
    assert re.fullmatch(r"\d+(\.\d+)?×", page.inner_text("#gain"))
    page.hover("#chart-tokens svg")
    expect(page.locator("#chart-tokens .now")).to_have_text(re.compile("tokens/s|no data"))
    for chart in ("tokens", "gain", "k", "requests", "kv"):
        labels = page.locator(f"#chart-{chart} svg text").all_text_contents()
        assert "seconds" in labels
        assert len(page.locator(f"#chart-{chart} .line-0[d]").get_attribute("d")) > 10


def counted(text: str) -> dict[str, float]:
    """Return the generated tokens, and the rounds by their K."""
    rounds = re.findall(
        r'^foredraft_spec_decode_chosen_k_total\{.*?k="(\d+)".*?\} (\S+)', text, re.M
    )
    (tokens,) = re.findall(r"^foredraft_generation_tokens_total\{.*\} (\S+)", text, re.M)
    return {"tokens": float(tokens), **{k: float(count) for k, count in rounds}}


def test_a_lost_engine_is_announced_until_it_is_back(visit: Tab, pair: Server) -> None:
    """Law: the notice is in plain words, and the page recovers when the engine is back."""
    page = visit.open("chat")
    expect(page.locator("#notice")).to_be_hidden()
    os.kill(pair.engine, signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("The engine was lost and is restarting")
    turn = say(page, "What is the capital of France?")  # waits for the next engine
    assert "Paris" in turn.locator(".text").inner_text()
    expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not here (AXE_CORE, node_modules)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, pair: Server, scheme: str) -> None:
    """Law: labels, roles, contrast and focus pass axe-core's rules, with content in each view, and
    a phone does not scroll sideways."""
    visit = Tab(browser, str(pair.http.base_url), color_scheme=scheme)
    page = visit.open("chat")
    say(page, "What is the capital of France?")
    assert violations(page) == []
    page.fill("#schema", "{")
    page.click("#send")
    assert violations(page) == []
    visit.open("race")
    page.click("#race-start")
    expect(page.locator("#race-result")).to_contain_text("differ")
    assert violations(page) == []
    visit.open("live")
    page.wait_for_selector("#kept .bar, #kept .nothing")
    assert violations(page) == []
    page.click("#change-key")
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 800})
    for view in VIEWS:
        visit.open(view)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert violations(page) == []
    page.goto(f"{visit.url}/docs")
    page.locator(".endpoint summary").nth(1).click()
    expect(page.get_by_role("cell", name="temperature", exact=True)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert violations(page) == []
    page.context.close()
    assert visit.complaints == []


def violations(page: Any) -> list[Any]:
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


def test_the_reference_lists_every_endpoint(visit: Tab) -> None:
    page = visit.page
    page.goto(f"{visit.url}/docs")
    expect(page.locator("#endpoints .endpoint").first).to_be_visible()
    document = httpx.get(f"{visit.url}/openapi.json").json()
    operations = {
        f"{method.upper()} {path}" for path, found in document["paths"].items() for method in found
    }
    shown = page.locator("#endpoints summary").all_text_contents()
    assert {re.sub(r"^([A-Z]+)\s*/", r"\1 /", text) for text in shown} == operations
    types = page.locator("#types summary").all_text_contents()
    assert set(types) == document["components"]["schemas"].keys()


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Any) -> None:
    """Law: a wrong key is reported; the right one is kept for the session and no longer."""
    environment = Script().environment()
    with apart(lambda: started((*SCRIPTED, "server.api_key=sk-secret"), environment)) as server:
        visit = Tab(browser, str(server.http.base_url))
        page = visit.page
        page.goto(visit.url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key").fill("sk-wrong")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog).to_contain_text("The server rejected this key")
        dialog.get_by_label("Key").fill("sk-secret")
        dialog.get_by_role("button", name="Use this key").click()
        expect(page.locator("#model")).to_have_text("demo")
        page.reload()
        expect(page.locator("#model")).to_have_text("demo")
        assert "sk-secret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        page.context.close()
        assert all("401" in complaint for complaint in visit.complaints)


def test_a_lost_connection_is_announced_and_restored(browser: Any, pair: Server) -> None:
    """Law: a request that failed meanwhile can be tried again."""
    visit = Tab(browser, str(pair.http.base_url))
    page = visit.open("chat")
    page.context.set_offline(True)
    expect(page.locator("#notice")).to_contain_text("The server is not responding")
    page.fill("#say", "Hello")
    page.press("#say", "Enter")
    expect(page.locator(".turn .error")).to_contain_text("The server is not responding")
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_hidden()
    with page.expect_request("**/v1/chat/completions") as request_info:
        page.get_by_role("button", name="Try again").click()
    assert request_info.value.post_data_json["messages"] == [{"role": "user", "content": "Hello"}]
    expect(page.locator(".turn.assistant .facts")).to_contain_text("seed")
    expect(page.locator(".turn .error")).to_have_count(0)
    page.context.close()


@contextmanager
def apart(start: Callable[[], Any]) -> Iterator[Server]:
    """A server whose event loop runs in another thread, since the browser's runs in this one."""
    ready, over = threading.Event(), threading.Event()
    found: list[Server] = []

    def run() -> None:
        with start() as server:
            found.append(server)
            ready.set()
            over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(120)
    try:
        yield found[0]
    finally:
        over.set()
        thread.join()
