"""`foredraft train draft`: a tiny draft approaches a tiny target, interrupted or not."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError, TraceError
from engine.lab.train import draft as program
from engine.lab.train import medusa
from engine.lab.train import program as shared
from engine.lab.train.agreement import coupled
from engine.lab.train.data import Text, batches, held_out, rows_of
from engine.lab.train.learning import Run, follow, llama
from engine.messages import SamplingParams, Submit
from engine.step.id_log import IdLog, read_ids
from tests.support import tiny, tiny_text, two_tokenizers
from tests.support.domains import sql
from tests.support.row_noise import gumbel

POLITE = ["--threads", "1", "--nice", "0", "--length", "48", "--reply", "12", "--continued", "3"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return folders of a target that writes text and of a draft that sometimes agrees."""
    folder, model = tmp_path_factory.mktemp("pair"), tiny_text.target()
    target = tiny_text.save(model, folder / "target")
    return target, tiny_text.save(tiny.draft_of(model), folder / "draft")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "shop.sql"
    file.write_text(sql(40))
    return file


def words(pair: tuple[str, str], text: Path, output: Path, *more: str) -> list[str]:
    named = ["--target", pair[0], "--text", str(text), "--output", str(output), *POLITE, *more]
    return named if "--layers" in more else [*named, "--draft", pair[1]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def figures(stdout: str) -> list[float]:
    """Return agreement before and after, at temperatures 0 and 1, from the table's last row."""
    row = stdout.splitlines()[-2].split()
    return [float(figure) for figure in row[-4:]]


def config(target: str, draft: str, **speculation: Any) -> EngineConfig:
    return EngineConfig.model_validate({
        "target": {"path": target}, "device": "cpu", "cache": {"num_blocks": 64},
        "speculation": {
            "proposer": {"path": draft}, "controller": {"kind": "fixed", "k": 3}, **speculation
        },
    })  # fmt: skip


def play(engine: Engine, prompts: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Return the replies and the number of accepted draft tokens."""
    replies, right = [list[int]() for _ in prompts], 0
    for i, prompt in enumerate(prompts):
        params = SamplingParams(seed=i, max_tokens=40, temperature=1.0, ignore_eos=True)
        engine.add(Submit(str(i), prompt, params, 0.0))
    while engine.has_work:
        for output in engine.step().items:
            replies[int(output.id)] += output.tokens
            right += output.accepted or 0 if output.finish else 0
    return replies, right


def test_a_draft_agrees_more_often_and_serves_as_one(
    pair: tuple[str, str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: the printed agreement rises, the output loads as a draft and drafts better in the
    engine, and no text depends on it."""
    output = tmp_path / "mine"
    assert program.main(words(pair, text, output, "--steps", "40")) == 0
    stdout = capsys.readouterr().out
    old_greedy, greedy, old_sampled, sampled = figures(stdout)
    assert greedy > old_greedy + 0.05
    assert sampled > old_sampled + 0.03
    assert f"foredraft serve --target {pair[0]} --draft {output}" in stdout
    assert not output.with_name("mine.training").exists()
    ids = tiny_text.tokenizer().encode(text.read_text()).ids
    prompts = [ids[at : at + 40] for at in range(0, 1440, 60)]
    replies, right = play(Engine(config(pair[0], str(output))), prompts)
    before, fewer = play(Engine(config(*pair)), prompts)
    assert replies == before
    assert right > fewer


def test_a_run_that_was_stopped_ends_with_the_same_weights(
    pair: tuple[str, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: after Ctrl-C and after a kill, each in the middle of a step."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert program.main(words(pair, text, whole, "--steps", "9")) == 0
    taken = 0

    def stopping(*given: Any) -> float:
        nonlocal taken
        taken += 1
        if taken == 4:
            raise KeyboardInterrupt
        if taken == 9:
            raise SystemError("killed")
        return follow(*given)

    monkeypatch.setattr(program, "follow", stopping)
    monkeypatch.setattr(shared, "CHECKPOINT", 0.0)
    run = words(pair, text, parts, "--steps", "9")
    assert program.main(run) == 130
    with pytest.raises(SystemError):
        program.main([*run, "--resume"])
    assert not parts.exists()
    assert program.main([*run, "--resume"]) == 0
    assert taken == 9 + 2  # two steps ran again
    ours, theirs = weights(whole), weights(parts)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_new_small_llama_fits_the_target(
    pair: tuple[str, str], text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new"
    new = ["--layers", "2", "--width", "64", "--steps", "2"]
    assert program.main(words(pair, text, output, *new)) == 0
    settings = json.loads((output / "config.json").read_text())
    assert (settings["num_hidden_layers"], settings["hidden_size"]) == (2, 64)
    play(Engine(config(pair[0], str(output))), [[20, 21, 22]])


def test_recorded_requests_are_learnt_from(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: recording is off by default; the file holds what was served over two starts and only its
    owner can read it; a truncated line is lost, and nothing else."""
    log, prompts = tmp_path / "ids", [[20 + i, 30, 40] for i in range(8)]
    recording = config(*pair, record_ids=str(log))
    replies, _ = play(Engine(recording), prompts)
    assert log.stat().st_mode & 0o77 == 0
    log.write_bytes(log.read_bytes() + b'{"prompt":[1')
    play(Engine(recording), prompts[:2])
    found = read_ids(str(log), tiny_text.vocab_size())
    assert sorted(each.prompt + each.reply for each in found[:8]) == sorted(
        prompt + reply for prompt, reply in zip(prompts, replies, strict=True)
    )
    assert len(found) == 10
    named = ["--target", pair[0], "--draft", pair[1], "--ids", str(log), *POLITE, "--steps", "2"]
    assert program.main([*named, "--output", str(tmp_path / "mine")]) == 0
    assert "ids" in capsys.readouterr().out


def test_a_log_ends_at_its_size(
    pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: the bound covers all starts; serving continues; a foreign file is refused, untouched."""
    log, size = tmp_path / "ids", 600
    recording = config(*pair, record_ids=str(log), record_ids_mib=size / (1 << 20))
    for _ in range(2):
        replies, _ = play(Engine(recording), [[20 + i, 30] for i in range(6)])
        assert all(len(reply) == 40 for reply in replies)
    assert 300 < log.stat().st_size <= size
    assert "size limit" in caplog.text
    (tmp_path / "other").write_text("mine\n")
    with pytest.raises(Exception, match="left unchanged"):
        Engine(config(*pair, record_ids=str(tmp_path / "other")))
    assert (tmp_path / "other").read_text() == "mine\n"


def test_only_what_has_ended_by_itself_is_recorded_for_its_owner(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: aborted requests leave no line; a file that others can read is made private."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (log := tmp_path / "ids").touch(0o644)
    engine = Engine(config(*pair, record_ids="~/ids"))
    for name in ("aborted", "whole"):
        params = SamplingParams(seed=0, max_tokens=20, temperature=0.0, ignore_eos=True)
        engine.add(Submit(name, [20, 30 if name == "whole" else 31], params, 0.0))
    while len(engine.step().items) < 2:
        pass
    engine.abort(["aborted"])
    while engine.has_work:
        engine.step()
    [found] = read_ids(str(log), tiny_text.vocab_size())
    assert (found.prompt, len(found.reply)) == ([20, 30], 20)
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["pipe", "/dev/full"])
def test_ids_go_to_a_regular_file(what: str, tmp_path: Path) -> None:
    """Bug: to see what it held, a pipe was waited for, and a device read until memory ran out."""
    path = tmp_path / what
    if what == "pipe":
        os.mkfifo(path)
    with pytest.raises(TraceError, match="not a regular file"):
        IdLog(str(path), 100, max_bytes=1000)


def test_answers_to_prompts_are_learnt_from(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"SELECT {i}\n" for i in range(6)))
    named = ["--target", pair[0], "--draft", pair[1], "--prompts", str(prompts), *POLITE]
    assert program.main([*named, "--steps", "2", "--output", str(tmp_path / "mine")]) == 0
    assert "replies" in capsys.readouterr().out


def test_a_text_called_replies_is_learnt_from_too(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the replies to --prompts took its place."""
    monkeypatch.chdir(tmp_path)
    Path("replies").write_text(sql(40))
    Path("prompts").write_text("SELECT 1\n\nSELECT 2\n")
    named = ["--target", pair[0], "--draft", pair[1], "--prompts", "prompts", "--text", "replies"]
    given = [*named, *POLITE, "--output", "mine", "--steps", "2"]
    program.check(parsed := program.build_parser().parse_args(given))
    found = shared.collected(parsed, lambda parsed, pair: None)
    assert len(found["learn"][0]) > 10


@pytest.mark.parametrize("name", ["all", "the target's own", "replies"])
def test_a_text_may_be_called_like_another_row_of_the_report(
    name: str, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Bug: its figures were hidden by the other row's, or in one row with them."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(sql(40))
    Path("prompts").write_text("SELECT 1\n\nSELECT 2\n")
    named = ["--target", pair[0], "--draft", pair[1], "--text", name, "--prompts", "prompts"]
    assert program.main([*named, *POLITE, "--output", "mine", "--steps", "2"]) == 0
    *rows, _ = (line.rsplit(maxsplit=5) for line in capsys.readouterr().out.splitlines())
    parts = [f"--text {name}", "replies", "the target's own"]
    assert [row[0].strip() for row in rows[-4:]] == [*parts, "all"]
    *counts, whole = (int(row[1]) for row in rows[-4:])
    assert sum(counts) == whole


def test_nothing_held_out_is_learnt_from(pair: tuple[str, str], text: Path, tmp_path: Path) -> None:
    """Law: of several texts whole ones are held out, and of what the target writes what continues
    text that is held out. Bug: rows of a text, of a request recorded twice and of the target's own
    were on both sides."""
    log, copy = tmp_path / "ids", tmp_path / "copy.sql"
    copy.write_text(text.read_text())
    prompts = [[20 + i % 4, 30, 40] for i in range(8)]
    for some in (prompts[:4], prompts[:4]):
        play(Engine(config(*pair, record_ids=str(log))), some)
    more = ["--steps", "2", "--length", "16", "--continued", "40", "--ids", str(log)]
    given = words(pair, text, tmp_path / "mine", *more, "--text", str(text), str(copy))
    program.check(parsed := program.build_parser().parse_args(given))
    found = shared.collected(parsed, lambda parsed, pair: None)
    learnt, held = {tuple(row) for row in found["learn"][0].tolist()}, found["held"]
    files = {f"--text {text}", f"--text {copy}", f"--ids {log}"}
    assert held.keys() == {*files, "the target's own"}
    for ids, _ in held.values():
        assert not learnt & {tuple(row) for row in ids.tolist()}
    beginnings = {row[:8] for row in learnt}
    assert not beginnings & {tuple(row[:8]) for row in held["the target's own"][0].tolist()}


def test_the_chance_to_agree_is_that_of_keyed_draws() -> None:
    """Law: the closed form matches the engine's noise, also for logits far apart."""
    target, draft = 3 * torch.randn(2, 3, 60, generator=torch.Generator().manual_seed(1))
    draft = target + 0.5 * draft
    draft[2] *= 40
    keys, equal = 4000, []
    for row in range(3):
        noise = gumbel([(7, position) for position in range(keys)], 60)
        both = [of[row].log_softmax(-1) + noise for of in (target, draft)]
        equal.append((both[0].argmax(-1) == both[1].argmax(-1)).float().mean().item())
    assert coupled(target, draft).tolist() == pytest.approx(equal, abs=0.03)
    assert coupled(target, target).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


def test_rows_count_what_the_target_says() -> None:
    """Law: a prompt's last position counts, and a text's last token has no successor; rows with
    nothing to learn are dropped, and held-out text is in no batch."""
    rows = rows_of([Text(list(range(1, 11)), 5), Text([50, 51])], 4)
    assert rows.ids.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0], [50, 51, 0, 0]]
    assert rows.counted.tolist() == [
        [False, True, True, True], [True, False, False, False], [True, False, False, False]
    ]  # fmt: skip
    many = [Text(list(range(400)))]
    held = held_out(many, 4, 0.1)
    learn = rows_of(many, 4).without({"many": held})
    assert held.ids[:, 0].tolist() == list(range(20, 400, 40))
    stream = batches(learn, 8, seed=3)
    seen = sorted(first for _ in range(12) for first in next(stream).ids[:, 0].tolist())
    assert seen == learn.ids[:, 0].tolist()
    again = next(batches(learn, 8, seed=3, step=12))
    assert torch.equal(again.ids, next(stream).ids)


def test_of_one_text_beside_empty_ones_rows_are_held_out() -> None:
    """Bug: nothing was, and training refused a long text beside requests without a reply."""
    texts = [Text([1, 2, 3], 2), Text(list(range(40))), Text([4], 0)]
    assert len(held_out(texts, 4, 0.1).ids) == 1


def test_of_one_text_given_twice_rows_are_held_out() -> None:
    """Bug: nothing was, and training refused two equal texts, though it takes one of them."""
    texts = [Text(list(range(40)))] * 2
    held = held_out(texts, 4, 0.1)
    assert len(held.ids) == 1
    assert len(rows_of(texts, 4).without({"twice": held}).ids) == 2 * 9


@pytest.mark.parametrize("share", [0.001, 0.9])
def test_of_texts_that_one_of_them_contains_rows_are_held_out(share: float) -> None:
    """Bug: of two requests of a conversation, the later one, which contains the earlier one, was
    held out, and training refused the rest, of which nothing was left."""
    texts = [Text(list(range(8))), Text(list(range(40)))]
    held = held_out(texts, 4, share)
    learn = rows_of(texts, 4).without({"both": held})
    known, left = ({tuple(row) for row in rows.ids.tolist()} for rows in (held, learn))
    assert (len(known), len(left)) == ((1, 9) if share < 0.5 else (9, 1))


@pytest.mark.parametrize("share", [0.001, 0.5, 0.9])
def test_of_two_rows_one_is_learnt_and_one_held_out(share: float) -> None:
    """Bug: a large share of two rows was both of them, and training without rows a traceback."""
    text = [Text(list(range(8)))]
    held = held_out(text, 4, share)
    learn = rows_of(text, 4).without({"text": held})
    assert (len(learn.ids), len(held.ids)) == (1, 1)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--text", "/nowhere.sql"], "cannot read the text in /nowhere.sql"),
        (["--text", "TEXT", "--target", "THERE"], "has no config.json in its folder"),
        (["--layers", "1"], "--draft names one there is"),
        (["--width", "64"], "--width is of a new draft"),
        (["--target", "org/other"], "--layers for a new one"),
        ([], "nothing to learn from"),
        (["--text", "SHORT"], "nothing fills two rows"),
        (["--text", "EMPTY"], "nothing fills two rows"),
        (["--text", "TEXT", "--output", "THERE"], "exists already"),
        (["--text", "TEXT", "--output", "/no/where"], "cannot write /no/where: No such file"),
        (["--text", "TEXT", "--resume"], "nothing to resume"),
        (["--text", "TEXT", "--draft", "OTHER"], "does not fit the target model"),
        (["--text", "TEXT", "--ids", "TEXT"], "was not written by speculation.record_ids"),
        # Bug: "prompt 1 was refused", though no prompt was given.
        (["--text", "TEXT", "--length", "1100"], "--length is 1100; the target's context has 512"),
        (["--text", "TEXT", "--minutes", "0"], "--minutes: '0' is not a number above 0"),
    ],
)
def test_a_mistake_is_one_sentence(
    more: list[str], part: str, pair: tuple[str, str], text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Law: exit code 2, and no file remains."""
    short, there, other = tmp_path / "short", tmp_path / "there", tmp_path / "other"
    short.write_text("a b c")
    (empty := tmp_path / "empty").touch()
    there.mkdir()
    if "OTHER" in more:
        tiny.save(tiny.draft_of(tiny.llama()), other)
    places = {"SHORT": short, "EMPTY": empty, "TEXT": text, "THERE": there, "OTHER": other}
    given = {"--target": pair[0], "--draft": pair[1], "--output": str(tmp_path / "mine")}
    arguments = [str(places.get(word, word)) for word in more]
    if "org/other" in arguments:
        del given["--draft"]
    usual = [word for pair_ in given.items() if pair_[0] not in arguments for word in pair_]
    try:
        code: object = program.main([*POLITE, *usual, *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert part in line
    assert not list(tmp_path.glob("mine*"))


def test_another_run_is_not_resumed(
    pair: tuple[str, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Law: --resume requires the options of the original run, and names the one that differs."""

    def stop(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    run = words(pair, text, tmp_path / "mine", "--steps", "2")
    with monkeypatch.context() as patch:
        patch.setattr(shared, "fit", stop)
        assert program.main(run) == 130
    assert program.main([*run, "--resume", "--seed", "5"]) == 2
    assert program.main(run) == 2
    [seed, again] = capsys.readouterr().err.splitlines()
    assert "--seed is 5, and the run was begun with 0" in seed
    assert "--resume continues it" in again


def test_a_large_vocabulary_is_learnt_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: gradients equal those of all rows at once, also if rows count differently."""
    torch.manual_seed(0)
    target, draft = (llama(64, 96, 1, vocabulary=50) for _ in range(2))
    ids = torch.randint(0, 50, (4, 12))
    counted = torch.rand(4, 12) < torch.tensor([0.9, 0.3, 0.5, 0.7])[:, None]
    found = []
    for numbers in (1 << 24, 1):
        monkeypatch.setattr("engine.lab.train.learning.NUMBERS", numbers)
        draft.zero_grad()
        far = follow(target, draft, ids, counted)
        found.append((far, draft.model.embed_tokens.weight.grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1])


class Stop(SystemError):
    """Stops the run as a kill would."""


@pytest.fixture
def stopped(
    pair: tuple[str, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return the command of a run killed before its first step, and its folder `mine.training`."""

    def stop(*given: Any, **named: Any) -> None:
        raise Stop

    run = words(pair, text, tmp_path / "mine", "--steps", "2")
    with monkeypatch.context() as patch:
        patch.setattr(shared, "fit", stop)
        with pytest.raises(Stop):
            program.main(run)
    return run


@pytest.mark.parametrize("name", ["data", "state"])
def test_a_damaged_checkpoint_is_named(
    name: str, stopped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a truncated or empty checkpoint gave a traceback."""
    file = tmp_path / "mine.training" / name
    for size in (file.stat().st_size // 2, 0):
        os.truncate(file, size)
        assert program.main([*stopped, "--resume"]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"{file} is damaged: delete the folder {file.parent}" in line


def test_the_other_program_does_not_resume_a_run(
    stopped: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = [word for word in stopped if word != "--draft"]
    other.remove(stopped[stopped.index("--draft") + 1])
    assert medusa.main([*other, "--resume"]) == 2
    assert "belongs to another training program" in capsys.readouterr().err


def test_a_run_starts_in_a_folder_without_a_checkpoint(
    pair: tuple[str, str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a run started there neither with --resume nor without. Foreign files are left alone."""
    work = tmp_path / "mine.training"
    work.mkdir()
    (work / "letter").touch()
    run = words(pair, text, tmp_path / "mine", "--steps", "2")
    assert program.main(run) == 2
    assert "is not a folder of a run" in capsys.readouterr().err
    (work / "letter").rename(work / ".data.7.part")  # as a kill leaves it
    assert program.main([*run, "--resume"]) == 0


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: torch raises a RuntimeError. Existing files stay."""

    def full(*given: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:664]\nunexpected pos 64 vs 0")

    shared.keep(tmp_path / "state", {"step": 1})
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ConfigError, match=r"state; is the disk full\?"):
        shared.keep(tmp_path / "state", {"step": 2})
    assert shared.load(tmp_path / "state") == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_a_draft_with_another_tokenizer_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: it can be served, so it was accepted and trained on ids of other tokens."""
    both = two_tokenizers.save(tmp_path)
    assert program.main(words(both, text, tmp_path / "mine", "--steps", "2")) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--draft {both[1]} has another tokenizer" in line


def test_with_steps_no_clock_decides_what_is_learnt(
    pair: tuple[str, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a seed gives the same rows even on a machine that is too slow for --minutes."""
    given = words(pair, text, tmp_path / "mine", "--minutes", "1e-9")
    parser = program.build_parser()
    for more in (["--steps", "2"], []):
        program.check(parsed := parser.parse_args([*given, *more]))
        found = shared.collected(parsed, lambda parsed, pair: None)
        assert ("the target's own" in found["held"]) == bool(more)


def test_agreement_that_looks_the_same_did_not_change() -> None:
    parsed = program.build_parser().parse_args(["--output", "mine"])
    for new, change in ((0.1242, "did not change"), (0.2, "rose"), (0.1, "fell")):
        assert f"text {change}, 0.124 to" in program.sentence(parsed, (0, 0.1241), (0, new), Run(1))
