"""The servers that `benchmarks.serve` compares: how each is installed, started, asked and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load import HOST, PlainConnection, build_request

ROOT = Path(__file__).parents[1]
NAME = "minilm"
#: The longest text of the benchmark, in tokens. The checkpoint itself sets 256, its position embeddings reach 512.
LONGEST = 512
#: Seconds until a server must answer its first request, and must have stopped.
START, STOP = 180.0, 40.0


@dataclass(frozen=True)
class Environment:
    """Packages in a virtual environment of their own, made at first use."""

    name: str
    requirements: Sequence[str]
    #: Whether to use the versions of constraints.txt. A torch pin keeps pip from CUDA where it finds the CPU build.
    is_constrained: bool = False

    def make(self, folder: Path) -> Path:
        """Returns the folder of the environment's programs."""
        place = folder / self.name
        installed, wanted = place / "requirements.txt", "\n".join(self.requirements) + "\n"
        if not installed.is_file() or installed.read_text(encoding="utf-8") != wanted:
            print(f"Installing {self.name} into {place}")
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            constraints = ["--constraint", str(ROOT / "constraints.txt")] if self.is_constrained else []
            pip = [str(place / "bin" / "pip"), "install", "-qq", "--no-compile", *constraints]
            subprocess.run([*pip, *self.requirements], check=True)
            installed.write_text(wanted, encoding="utf-8")
        return place / "bin"


#: infinity 0.0.78 needs libraries of its time; with newer ones it does not start.
INFINITY = Environment(
    "infinity",
    [
        "infinity-emb[torch,server,optimum]==0.0.78",
        "torch==2.13.0",
        "transformers<4.49",
        "optimum[onnxruntime]<2",
        "pyarrow<21",
        "pandas<2.3",
        "datasets<4",
        "numpy<2",
        "scipy<1.15",
        "scikit-learn<1.6",
        "onnx<1.18",
        "onnxruntime<1.21",
    ],
)
FASTAPI = Environment("fastapi", ["fastapi==0.162.7", "uvicorn[standard]", "sentence-transformers"], True)


@dataclass(frozen=True)
class Place:
    """What a server's command line depends on."""

    model: Path
    port: int
    threads: int
    environments: Path
    #: Further options of `bertblocks serve`.
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Server:
    """A server with its command line; `variables` are added to its process environment."""

    title: str
    command: Callable[[Place], list[str]]
    path: str = "/v1/embeddings"
    variables: Callable[[Place], dict[str, str]] = field(default=lambda place: {})
    is_ours: bool = False
    #: The least cosine of its vectors to those of sentence-transformers.
    agreement: float = 0.999

    def request(self, texts: str | Sequence[str]) -> bytes:
        body = {"model": NAME, "input": texts if isinstance(texts, str) else list(texts), "encoding_format": "float"}
        return build_request(self.path, json.dumps(body).encode())


def infinity_command(place: Place) -> list[str]:
    program = str(INFINITY.make(place.environments) / "infinity_emb")
    model = ["--model-id", str(place.model), "--served-model-name", NAME, "--engine", "torch", "--device", "cpu"]
    exact = ["--dtype", "float32", "--no-bettertransformer", "--no-compile"]
    return [program, "v2", *model, *exact, "--host", HOST, "--port", str(place.port), "--log-level", "warning"]


def fastapi_command(place: Place, workers: int = 1) -> list[str]:
    program = str(FASTAPI.make(place.environments) / "uvicorn")
    address = ["--host", HOST, "--port", str(place.port), "--log-level", "warning", "--no-access-log"]
    app = ["benchmarks.fastapi_service:app", "--app-dir", str(ROOT)]
    return [program, *app, "--workers", str(workers), *address]


def fastapi_variables(place: Place, workers: int = 1) -> dict[str, str]:
    threads = str(max(place.threads // workers, 1))
    return {"MODEL": str(place.model), "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


def our_command(place: Place, *numbers: str) -> list[str]:
    address = ["--host", HOST, "--port", str(place.port), "--threads", str(place.threads)]
    program = [sys.executable, "-m", "bertblocks", "serve", f"{NAME}={place.model}", "--log-format", "off"]
    return [*program, *address, *numbers, *place.options]


SERVERS = {
    "infinity": Server(
        "infinity 0.0.78, torch fp32",
        infinity_command,
        "/embeddings",
        lambda place: {"INFINITY_ANONYMOUS_USAGE_STATS": "0"},
    ),
    "fastapi": Server(
        "FastAPI + sentence-transformers fp32",
        fastapi_command,
        variables=fastapi_variables,
    ),
    "fastapi-2": Server(
        "FastAPI + sentence-transformers fp32, 2 processes",
        lambda place: fastapi_command(place, workers=2),
        variables=lambda place: fastapi_variables(place, workers=2),
    ),
    "ours": Server("BertBlocks fp32", lambda place: our_command(place, "--dtype", "float32"), is_ours=True),
    "ours-int8": Server("BertBlocks int8", lambda place: our_command(place, "--int8"), is_ours=True, agreement=0.99),
}


def copy_checkpoint(source: Path, folder: Path) -> Path:
    """A copy that reads texts up to `LONGEST` tokens in every library."""
    model = folder / NAME
    shutil.copytree(source, model)
    settings = json.loads((model / "sentence_bert_config.json").read_text(encoding="utf-8"))
    settings["max_seq_length"] = LONGEST
    (model / "sentence_bert_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return model


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def running(server: Server, place: Place, log: Path) -> Iterator[int]:
    """Starts the server, waits until it embeds a text, and yields its process id; stops it at the end."""
    threads = {"OMP_NUM_THREADS": str(place.threads), "HF_HUB_OFFLINE": "1"}
    variables = os.environ | threads | server.variables(place)
    with log.open("wb") as output:
        process = subprocess.Popen(server.command(place), env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(server, place.port, process, log)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(server: Server, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), PlainConnection(port) as connection:
            if connection.ask(server.request("Is it there?"))[0] == 200:
                return
        time.sleep(0.2)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise SystemExit(f"{server.title} did not start; its last words:\n{tail}")


def memory_of(pid: int) -> int:
    """Resident bytes of a process and its descendants; shared pages count once for each."""
    found, waiting = 0, [pid]
    while waiting:
        current = waiting.pop()
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            lines = Path(f"/proc/{current}/status").read_text(encoding="utf-8").splitlines()
            found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
            for children in Path(f"/proc/{current}/task").glob("*/children"):
                waiting += map(int, children.read_text(encoding="utf-8").split())
    return found
