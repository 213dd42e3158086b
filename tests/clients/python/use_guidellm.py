"""guidellm, a load generator: a complete benchmark of a few requests, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import MODEL, ROOT, run

TOKENIZER = sys.argv[2]  # a folder with the model's tokenizer


def streaming() -> str:
    written = Path(tempfile.mkdtemp(), "benchmarks.json")
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={ROOT},model={MODEL}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", f"kind=json,path={written}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    [benchmark] = json.loads(written.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][0]["info"]["error"]
    assert len(requests["successful"]) >= 4
    return f"{len(requests['successful'])} requests"


run(streaming)
