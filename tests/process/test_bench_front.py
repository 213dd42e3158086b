"""`foredraft bench front`, briefly, with real processes: what it reports."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

SECONDS = 180  # on a busy machine


async def run_front(*words: str) -> tuple[int, str, str]:
    """Run it in a child, which pins itself to some cores; return exit code, stdout, stderr."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "server.lab.bench.front", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(child.communicate(), SECONDS)
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="it reads /proc")
def test_it_reports_both_kinds_of_replies(tmp_path: Path) -> None:
    """Law: every reply is whole (it refuses others); stdout has a card, the file all figures."""
    file = tmp_path / "found.json"
    words = "--streams 3 --tokens 12 --seconds 1 --rate 3000 --scenes load --json"
    code, out, err = asyncio.run(run_front(*words.split(), str(file)))
    assert code == 0, err
    findings = json.loads(file.read_text())
    kinds = [(found["scene"], found["kind"]) for found in findings]
    assert kinds == [("load", "completions"), ("load", "chat")]
    for found in findings:
        assert found["requests"] >= 1
        assert found["tokens_per_second"] > 0
        assert found["tokens_per_event"] >= 1
        assert found["cpu_share"] >= 0
        assert found["first_token"] > 0
    assert len(out.splitlines()) == 1 + len(findings)
