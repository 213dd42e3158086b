"""Comparison of modes: requests, counts and reports, with made-up figures."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.errors import ConfigError
from engine.lab.comparison.figures import (
    Cell,
    Comparison,
    Figures,
    Reply,
    Run,
    StepSums,
    equal_texts,
    figures,
    under_load,
)
from engine.lab.comparison.options import build_parser, settings
from engine.lab.comparison.prompt_files import read_texts
from engine.lab.comparison.race import LONGEST, SHORTEST, Race, rotated
from engine.lab.comparison.ratio import median_of
from engine.lab.comparison.report import card, show
from engine.lab.comparison.workload import (
    AUTO,
    EDITS,
    OFF,
    TEMPLATES,
    Arm,
    Workload,
    lanes,
    parse_arms,
    pool,
)
from engine.lab.files import replace_file
from tests.support.arms import ScriptedPlayer

ARMS = parse_arms("off,2,4,auto")
POOLS = {"code": ["def f"], "random": ["x#~"]}
SPEEDS = {"off": 10.0, "K=2": 14.0, "K=4": 11.5, "auto": 13.5}


def compared(player: ScriptedPlayer | None = None) -> Comparison:
    """Return the comparison of two workloads, with the scripted speeds."""
    player = player or ScriptedPlayer(lambda arm, prompt: SPEEDS[arm.name])
    chosen = [Workload("code", temperature, 2, tokens=9) for temperature in (0.0, 1.0)]
    return Race(ARMS, chosen, POOLS).run(player)


def test_a_rate_covers_the_time_under_full_load() -> None:
    """Law: a rate covers the time until the first lane has no request left."""
    run = Run(
        [Reply(0, 1, 0.0, [(1.0, 2), (2.0, 2)]), Reply(1, 2, 0.0, [(1.0, 1), (2.0, 1), (4.0, 9)])]
    )
    found = figures(run, lanes=2)
    assert found.seconds == 2.0
    assert found.rate == 3.0
    assert found.between == pytest.approx((0.5 + 0.3) / 2)
    assert run.first_waits() == [1.0, 1.0]
    with pytest.raises(ValueError, match="not answered"):
        figures(Run([run.replies[0]]), lanes=2)


def test_texts_are_compared_up_to_the_shorter_one() -> None:
    """Law: a truncated reply counts as equal if it is a prefix of the other."""
    whole = Run([Reply(0, 5, 0.0, [], [1, 2, 3]), Reply(1, 6, 0.0, [], [7, 8])])
    cut = Run([Reply(1, 6, 0.5, [], [7]), Reply(0, 5, 0.0, [], [1, 2])])
    other = Run([Reply(0, 5, 0.0, [], [1, 9]), Reply(1, 6, 0.0, [], [])])
    assert equal_texts(whole, cut) == (2, 2)
    assert equal_texts(whole, other) == (2, 1)


def test_every_mode_gets_the_same_requests() -> None:
    """Law: requests are a function of cell, round, lane and position; no seed occurs twice."""
    workload = Workload("code", 1.0, 4, tokens=5)
    again = [lanes(workload, POOLS, round_) for round_ in (-1, 0, 1)]
    assert again == [lanes(workload, POOLS, round_) for round_ in (-1, 0, 1)]
    seeds = [request.seed for plan in again for lane in plan for request in lane]
    assert len(set(seeds)) == len(seeds) == 3 * 4 * 3


def test_lanes_start_new_texts_in_turn() -> None:
    """Law: the first replies of the lanes end one after another, so that lanes start new texts in
    turn. A run, which ends with its first lane, has about `run_tokens` tokens."""
    for count in (1, 4, 16, 32):
        workload = Workload("code", 1.0, count, tokens=32)
        plan = lanes(workload, POOLS, 0)
        firsts = [lane[0].tokens for lane in plan]
        assert firsts == sorted(set(firsts))
        assert firsts[-1] == 32
        assert {request.tokens for lane in plan for request in lane[1:]} == {32}
        shortest = min(sum(request.tokens for request in lane) for lane in plan)
        assert shortest * count == workload.run_tokens


def test_the_fastest_k_of_all_rounds_is_the_best_in_hindsight() -> None:
    """Law: every mode runs in every round; the median over rounds decides, not one lucky round."""
    for cell in compared().cells:
        assert [len(cell.rounds[arm]) for arm in ARMS] == [3, 3, 3, 3]
        assert cell.fastest("fixed") == Arm("fixed", 2)
        assert cell.fastest("other") is None
    two, four = Arm("fixed", 2), Arm("fixed", 4)
    cell = Cell(Workload("code", 0.0, 1))
    for arm, rates in {AUTO: [10.0] * 3, two: [20.0, 9.0, 9.0], four: [9.0, 10.0, 11.0]}.items():
        cell.rounds[arm] = [Figures(rate, 1, 1.0) for rate in rates]
    assert cell.fastest("fixed") == four
    ratio = cell.ratio(AUTO, four)
    assert ratio is not None
    assert ratio.value == 1.0
    assert cell.ratio(AUTO, OFF) is None


def test_runs_are_compared_over_the_same_number_of_tokens() -> None:
    """Law: a run whose first lane ends early is compared over as many tokens of the other runs.
    Else its prefills would be spread over fewer tokens."""
    plain = Run([Reply(lane, lane, 0.0, [(2.0 + i, 1) for i in range(30)]) for lane in range(2)])
    quick = Run(
        [
            Reply(0, 0, 0.0, [(2.0 + 1.0 * i, 2) for i in range(15)]),
            Reply(1, 1, 0.0, [(2.0 + 1.0 * i, 1) for i in range(30)]),
        ]
    )
    assert (under_load(plain, 2), under_load(quick, 2)) == (60, 45)
    whole = [figures(run, lanes=2).rate for run in (plain, quick)]
    assert whole == pytest.approx([60 / 31, 45 / 16])
    found = [figures(run, lanes=2, upto=45) for run in (plain, quick)]
    assert [each.tokens for each in found] == [46, 45]
    assert [each.rate for each in found] == pytest.approx([46 / 24, 45 / 16])


def test_replies_are_as_long_as_the_time_allows() -> None:
    """Law: a machine twice as fast gets longer replies; all runs together fit the minutes."""
    chosen = [Workload("code", temperature, n) for temperature in (0.0, 1.0) for n in (1, 4)]

    def found(speed: float, workloads: list[Workload] = chosen) -> list[Workload]:
        player = ScriptedPlayer(lambda arm, prompt: speed)
        return Race(ARMS, workloads, POOLS, rounds=3, minutes=4.0).sized(player)

    one = found(50.0)[0].tokens
    assert found(25.0)[0].tokens == pytest.approx(one / 2, abs=1)
    seconds = [workload.run_tokens / (50.0 * workload.concurrency) for workload in found(50.0)]
    assert 3 * 60 < sum(seconds) * len(ARMS) * (3 + 1) < 4.1 * 60
    assert found(1e4)[0].tokens == LONGEST
    assert found(0.01)[0].tokens == SHORTEST
    sized = [Workload("code", 0.0, 1, tokens=7)]
    assert found(50.0, sized) == sized


@pytest.mark.parametrize(("tokens", "rounds"), [(0, 1), (7, 3)])
def test_rounds_are_left_out_where_time_has_run_out(tokens: int, rounds: int) -> None:
    """Law: every cell has at least one round, and all rounds if the reply length is given, since
    then there is no time limit. Bug: `--minutes 1` took several minutes on a busy machine."""
    workloads = [Workload("code", 0.0, 1, tokens), Workload("code", 0.0, 4, tokens)]
    player = ScriptedPlayer(lambda arm, prompt: 50.0)
    found = Race(ARMS, workloads, POOLS, rounds=3, minutes=1e-9).run(player)
    assert [len(cell.rounds[ARMS[0]]) for cell in found.cells] == [rounds] * 2


def test_the_order_rotates_and_the_first_round_does_not_count() -> None:
    """Law: runs for first-token times, for the prefix cache and for warm-up come first."""
    player = ScriptedPlayer(lambda arm, prompt: SPEEDS[arm.name])
    comparison = compared(player)
    order = [" ".join(arm.name for arm in rotated(ARMS, round_)) for round_ in (0, 1, 2)]
    one = ["cold off K=2 K=4 auto", "warm", "off K=2 K=4 auto", *order]
    assert player.calls == one * 2
    assert order[0] == order[2] == "off K=2 K=4 auto"
    assert order[1] == "K=4 auto off K=2"
    assert comparison.passed


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_first_arm_changes_between_rounds(count: int) -> None:
    """Bug: of two arms the same one always ran first, so a drift of the machine favoured it."""
    arms = [Arm("fixed", k) for k in range(count)]
    orders = [rotated(arms, round_) for round_ in (0, 1)]
    assert len({order[0] for order in orders}) == min(count, 2)
    assert all(set(order) == set(arms) for order in orders)


def test_the_card_has_rates_and_ratios() -> None:
    """Law: it has rates and paired ratios, but no verdict: that is given by tune."""
    text = card(compared())
    assert "1.350 [1.35, 1.35]" in text
    assert "0.964 [0.96, 0.96]" in text
    assert " 100.0 " in text  # first-token time at K = 0
    assert text.splitlines()[-1] == "texts equal across modes: 108 of 108"


def test_acceptance_by_context_is_shown_where_there_are_several() -> None:
    """Law: with several context lengths, a column has the main proposer's acceptance by each."""
    comparison = compared()
    assert "by context" not in card(comparison)
    run = comparison.cells[0].rounds[AUTO][0]
    steps = StepSums(proposed_behind=[8, 4, 0], accepted_behind=[6, 1, 0])
    run.kept_by_context = steps.kept_by_context
    text = card(comparison)
    assert "by context" in text
    assert "1k 0.75 4k 0.25" in text


def test_a_different_text_fails_where_equality_is_promised() -> None:
    """Law: the exit code is 1, unless the precision does not promise equal texts."""
    for exact in (True, False):
        player = ScriptedPlayer(lambda arm, prompt: SPEEDS[arm.name], exact=exact, liar=AUTO)
        comparison = compared(player)
        assert comparison.texts_equal < comparison.texts_compared
        assert comparison.passed is not exact
        assert show("bench", {}, comparison, json=None) == int(exact)


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Law: the JSON file has every figure; a writer that fails leaves nothing behind."""
    path = tmp_path / "found.json"
    assert show("bench", {"target": "t"}, compared(), json=str(path)) == 0
    found = json.loads(path.read_text())
    assert found["format"] == "foredraft-bench"
    assert found["cells"][0]["modes"]["K=2"]["rounds"][0]["acceptance"] == [0.5, 0.5]
    assert found["cells"][0]["modes"]["auto"]["against_off"]["value"] == pytest.approx(1.35)

    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(ConfigError, match=r"cannot write .*: disk full"):
        replace_file(path, fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.json"]
    assert json.loads(path.read_text()) == found


def test_intervals_hold_the_median() -> None:
    """Law: intervals are deterministic, ordered, and within the range of the values."""
    found = median_of([1.0, 1.1, 0.9, 1.05, 0.95])
    assert found.value == 1.0
    assert 0.9 <= found.low < found.value < found.high <= 1.1
    assert median_of([1.0, 1.1, 0.9, 1.05, 0.95]) == found


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--modes", "off,fast"], "unknown mode 'fast'; allowed are off, auto"),
        (
            ["--modes", "64"],
            "unknown mode '64'; allowed are off, auto, and a number K",
        ),
        (["--modes", "2,off,2"], "names a mode twice"),
        (["--tokens", "64", "--minutes", "3"], "and --tokens how long they are"),
        (["--json", "x" * 300], ": File name too long"),
        (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
        (["--modes", ""], "unknown mode ''"),
        (["--json", "/dev/null"], "it is not a regular file"),
        (["--prompts", "/nowhere.txt"], "cannot read the prompts in /nowhere.txt"),
        (["--prompts", "p.txt", "--kinds", "code"], "--kinds is for the built-in prompts"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], problem: str) -> None:
    """Law: the sentence names what was given and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        settings(build_parser("foredraft bench").parse_args(arguments))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--kinds", "poetry"],
            "'poetry' is not one of code, prose, json, random, chat, edits, quotes, templates",
        ),
        (["--concurrency", "0"], "'0' is not a whole number from 1 to 256"),
        (["--concurrency", "four"], "'four' is not a whole number from 1 to 256"),
        (["--temperatures", "-1"], "'-1' is not a number from 0, at most 2"),
        (["--temperatures", "nan"], "'nan' is not a number from 0, at most 2"),
        (["--tokens", "0"], "'0' is not a whole number from 1 to 4096"),
        (["--minutes", "0"], "'0' is not a number above 0, at most 10000"),
        (["--minutes", "nan"], "'nan' is not a number above 0, at most 10000"),
        (["--rounds", "-2"], "'-2' is not a whole number from 1 to 1000"),
    ],
)
def test_wrong_values_are_sentences(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: the sentence names the option, what was given and what is allowed."""
    with pytest.raises(SystemExit) as ended:
        build_parser("foredraft bench").parse_args(arguments)
    assert ended.value.code == 2
    error = f"foredraft bench: argument {arguments[0]}: {problem}\n"
    assert capsys.readouterr().err == error


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    """Law: the file has texts or JSON objects; an error names its line."""
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("one\ntwo\n")
    lines.write_text('{"prompt": "one"}\n{"body": {"prompt": "two"}}\n')
    assert read_texts(str(plain)) == read_texts(str(lines)) == ["one", "two"]
    race = settings(build_parser("x").parse_args(["--prompts", str(plain)]))
    assert {workload.kind for workload in race.workloads} == {"file"}
    lines.write_text('{"prompt": "one\u2028more"}\r\n{"prompt": "a\x85b"}\r{"prompt": "two"}\n')
    assert read_texts(str(lines)) == ["one\u2028more", "a\x85b", "two"]  # bug: was "not JSON"
    plain.write_text("one\nand more\n\ntwo\n")  # bug: bench took each line for a prompt
    assert read_texts(str(plain)) == ["one\nand more", "two"]
    for text, word in (
        ("", "contains no prompts"),
        ('{"prompt": "one"}\none', "line 2 is not JSON"),
        ('{"prompt": "one"}\n"two"', "line 2 must be a JSON object"),
        ('{"text": "a"}', "line 1 must be an object with `prompt`"),
        ('{"messages": []}', "line 1 must be an object with `prompt`: "),
        ('{"prompt": ""}', "the text is empty"),
        ('{"prompt": ' + "[" * 100_000, "line 1 is not JSON"),
    ):
        lines.write_text(text)
        with pytest.raises(ConfigError, match=word):
            read_texts(str(lines))


def test_plain_texts_are_messages_for_a_chat_model(tmp_path: Path) -> None:
    """Law: if messages can be rendered, a text is a user message; `prompt` stays as it is."""
    path = tmp_path / "p"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    assert read_texts(str(path), lambda turns: f"<{turns[-1]['content']}>") == ["a", "<b>"]
    path.write_text("a\n")
    assert read_texts(str(path), lambda turns: f"<{turns[-1]['content']}>") == ["<a>"]
    with pytest.raises(ConfigError, match="line 1 .*: system is needed"):  # bug: a traceback
        read_texts(str(path), Mock(side_effect=TypeError("system is needed")))


def test_a_prompts_file_is_no_pipe_and_not_overwritten(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_texts(str(tmp_path / "pipe"))
    path = tmp_path / "p.jsonl"
    path.write_text("one\n")
    with pytest.raises(ConfigError, match="which is read"):
        settings(build_parser("x").parse_args(["--prompts", str(path), "--json", str(path)]))


def test_the_quick_grid_is_small() -> None:
    """Law: --quick keeps the corners of the grid; other options still apply."""
    race = settings(build_parser("x").parse_args(["--quick", "--rounds", "1"]))
    assert {workload.concurrency for workload in race.workloads} == {1, 32}
    assert {workload.kind for workload in race.workloads} == {"code", "random"}
    assert race.rounds == 1
    given = ["--quick", "--kinds", "code,json", "--concurrency", "1,2,4"]
    race = settings(build_parser("x").parse_args(given))  # bug: json and 2 were ignored
    assert {workload.concurrency for workload in race.workloads} == {1, 2, 4}
    assert {workload.kind for workload in race.workloads} == {"code", "json"}
    whole = settings(build_parser("x").parse_args([]))
    assert len(whole.workloads) == 4 * 2 * 4
    assert all(len(pool) >= 16 for pool in whole.pools.values())


def test_prompts_of_templates_are_alike_and_come_once() -> None:
    """Law: no prompt of `templates` comes twice, in any round or workload, as one of `json` does;
    all are from a few templates, in turn, and the same in each run."""
    parsed = build_parser("x").parse_args(["--kinds", "json,templates", "--rounds", "5"])
    race = settings(parsed)
    prompts = Counter[str]()
    for workload in race.workloads:
        assert workload.kind == TEMPLATES or not workload.first
        for round_ in range(-1, race.rounds):
            for lane in lanes(replace(workload, tokens=8), race.pools, round_):
                prompts.update(f"{workload.kind} {request.prompt}" for request in lane)
                assert all(request.ends == (workload.kind == TEMPLATES) for request in lane)
    found = race.pools[TEMPLATES]
    assert {count for text, count in prompts.items() if text.startswith(TEMPLATES)} == {1}
    assert max(prompts.values()) > 1
    assert sum(text.startswith(TEMPLATES) for text in prompts) == len(found) == len(set(found))
    assert list(found) == settings(parsed).pools[TEMPLATES]
    beginnings = [prompt[:36] for prompt in found]
    assert len(set(beginnings)) == 3  # both tools begin alike
    assert beginnings[:40:4] == beginnings[:1] * 10


def test_an_edits_prediction_differs_in_one_name() -> None:
    """Law: a prediction of `edits` is the code in the question but for the variable to rename."""
    found = pool(EDITS)
    assert len(found) >= 16
    for round_ in range(8):
        [lane] = lanes(Workload(EDITS, 0.0, 1, tokens=8), {EDITS: found}, round_)
        for request in lane:
            assert request.prompt.endswith("assistant\n")
            assert request.prediction.startswith("```python\ndef ")
            code = request.prompt[request.prompt.index("```") : request.prompt.rindex("```") + 3]
            words = (re.findall(r"\w+", text) for text in (code, request.prediction))
            [(old, new)] = {pair for pair in zip(*words, strict=True) if pair[0] != pair[1]}
            assert re.search(rf"\b{old}\b", request.prompt.replace(code, ""))
            assert new == "other_name"
            assert request.ends
    [lane] = lanes(Workload("chat", 0.0, 1, tokens=8), {"chat": pool("chat")}, 0)
    assert not any(request.prediction for request in lane)
