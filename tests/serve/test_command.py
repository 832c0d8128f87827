"""`bertblocks serve` as a process with real models, and every command of the page about serving."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertblocks import Predictor
from bertblocks.serve.models import ServedModel
from tests.serve.models import make_models

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
START = "import os, sys; print(os.getpid(), flush=True); from bertblocks.cli.main import main; main()"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models with each head, by name."""
    root = tmp_path_factory.mktemp("models")
    model: ServedModel
    for model in make_models():
        model.predictor.model.save_pretrained(root / model.name)
        model.predictor.tokenizer.save_pretrained(root / model.name)
    return {path.name: path for path in sorted(root.iterdir())}


@contextlib.contextmanager
def command(warm_python: list[str], *arguments: object) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Starts the command on a free port; yields its client, its process id, and the port once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["serve", *map(str, arguments), "--port", str(port), "--dtype", "float32", "--threads", "1"]
    process = subprocess.Popen(
        [*warm_python, "-c", START, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    pid = int(process.stdout.readline())
    try:
        deadline = time.monotonic() + 60
        while ask(port, "GET", "/ready")[0] != 200:
            assert time.monotonic() < deadline, process.stderr and process.stderr.read()
            time.sleep(0.05)
        yield process, pid, port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """The status and the JSON of an answer; 0 if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.connect()
    except ConnectionRefusedError:
        return 0, None
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_under_load_loses_no_request(warm_python: list[str], models: dict[str, Path], workers: int) -> None:
    """Every request that is sent is answered with 200, or finds nobody who listens."""
    text = "the cat sat on the mat"
    expected = Predictor(models["embedder"], dtype=torch.float32).encode([text])[0]
    with (
        command(warm_python, f"small={models['embedder']}", "--workers", workers) as (process, pid, port),
        ThreadPoolExecutor(8) as pool,
    ):

        def ask_until_the_end(number: int) -> int:
            answered = 0
            while (answer := ask(port, "POST", "/embed", {"inputs": [text] * (1 + number * 3)}))[0]:
                assert answer[0] == 200
                np.testing.assert_allclose(answer[1][-1], expected, atol=1e-5)
                answered += 1
            return answered

        clients = [pool.submit(ask_until_the_end, number) for number in range(8)]
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert all(client.result() for client in clients)
    assert process.returncode == 0
    assert f"Serving on http://127.0.0.1:{port}" in out
    assert re.search(r"small +float32 +cpu +\d+ +embed", out)


def test_the_requests_of_the_page_are_answered(warm_python: list[str], models: dict[str, Path]) -> None:
    """With models that have the names of the page, or none."""
    lines = re.findall(r"^curl localhost:8000(/\S+) --json (.+)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) > 8
    folders = [f"minilm={models['embedder']}", *(models[name] for name in models if name != "embedder")]
    with command(warm_python, *folders) as (_, _, port):
        for path, words in lines:
            status, answer = ask(port, "POST", path, json.loads(shlex.split(words)[0]))
            assert status == 200, (path, answer)


def test_a_model_that_does_not_exist_is_one_sentence(warm_python: list[str]) -> None:
    done = subprocess.run(
        [*warm_python, "-m", "bertblocks", "serve", "no-such/model/here", "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no-such/model/here" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
