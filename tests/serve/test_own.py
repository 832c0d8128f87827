"""Our own routes, compared with transformers on the same weights; vectors of every kind; clients that misbehave."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import pipeline

from bertblocks.serve.app import make_app
from bertblocks.serve.errors import DeadlineExceeded, Overloaded, ShuttingDown, WorkerLost
from bertblocks.serve.settings import ServeSettings
from tests.serve.live import Live, listen, theirs_hidden, theirs_logits, theirs_mean

TEXTS = ["plain words are here", "two leading"]
RAW = {"Accept": "application/octet-stream"}


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embed_in_every_precision(http: httpx.Client, live: Live) -> None:
    expected = theirs_mean(live, TEXTS).numpy()
    answer = post(http, "/v1/embed", inputs=TEXTS)
    assert (answer["model"], answer["dtype"]) == ("embedder", "float32")
    assert answer["usage"] == {"tokens": sum(len(live.tokenizer(text)["input_ids"]) for text in TEXTS)}
    np.testing.assert_allclose(answer["results"], expected, atol=1e-5)
    np.testing.assert_allclose(
        post(http, "/v1/embed", inputs=TEXTS, precision="float16")["results"], expected, atol=2e-3
    )
    bits = post(http, "/v1/embed", inputs=TEXTS, precision="binary")["results"]
    np.testing.assert_array_equal(np.unpackbits(np.array(bits, np.uint8), axis=-1), expected > 0)
    numbers = post(http, "/v1/embed", inputs=TEXTS, precision="int8")
    limit = numbers["range"]
    assert limit == pytest.approx(4 / np.sqrt(32))
    step = 2 * limit / 255
    restored = (np.array(numbers["results"]) + 128.5) * step - limit
    np.testing.assert_allclose(restored, expected, atol=step)


def test_int8_of_a_text_does_not_depend_on_the_others(http: httpx.Client) -> None:
    alone = post(http, "/v1/embed", inputs=TEXTS[0], precision="int8")["results"][0]
    assert post(http, "/v1/embed", inputs=["two", TEXTS[0], "xxxx"], precision="int8")["results"][1] == alone


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", "<f4"), ("float16", "<f2"), ("int8", "i1"), ("binary", "u1")]
)
def test_raw_and_base64_hold_the_numbers_of_json(http: httpx.Client, precision: str, dtype: str) -> None:
    body = {"inputs": TEXTS, "precision": precision, "dimensions": 16}
    numbers = np.array(post(http, "/v1/embed", **body)["results"])
    raw = http.post("/v1/embed", json=body, headers=RAW)
    assert raw.headers["content-type"] == "application/octet-stream"
    shape = tuple(map(int, raw.headers["x-shape"].split(",")))
    assert shape == (2, 2 if precision == "binary" else 16)
    assert raw.headers["x-dtype"] == np.dtype(dtype).name
    np.testing.assert_array_equal(
        np.frombuffer(raw.content, dtype).reshape(shape).astype(np.float32), numbers.astype(np.float32)
    )
    encoded = post(http, "/v1/embed", **body, encoding="base64")["results"]
    assert b"".join(map(base64.b64decode, encoded)) == raw.content


def test_multi_gives_the_vectors_of_tokens(http: httpx.Client, live: Live) -> None:
    expected = [theirs_hidden(live, text, "tokens").numpy() for text in TEXTS]
    answer = post(http, "/v1/multi", inputs=TEXTS)
    for found, vectors in zip(answer["results"], expected, strict=True):
        np.testing.assert_allclose(found, vectors, atol=1e-4)
    raw = http.post("/v1/multi", json={"inputs": TEXTS}, headers=RAW)
    assert raw.headers["x-lengths"] == ",".join(str(len(vectors)) for vectors in expected)
    np.testing.assert_allclose(np.frombuffer(raw.content, "<f4").reshape(-1, 32), np.concatenate(expected), atol=1e-4)


def test_sparse_names_its_tokens(http: httpx.Client, live: Live) -> None:
    logits = live.theirs["language"](**live.tokenizer(TEXTS[0], return_tensors="pt")).logits[0]
    weights = logits.relu().log1p().amax(dim=0)
    (vector,) = post(http, "/v1/sparse", inputs=TEXTS[0], top_k=5)["results"]
    best = sorted(weights.topk(5).indices.tolist())
    assert vector["indices"] == best
    assert vector["values"] == pytest.approx(weights[best].tolist(), abs=1e-4)
    assert vector["tokens"] == [token or "" for token in live.tokenizer.convert_ids_to_tokens(best)]


def test_classify_texts_and_pairs(http: httpx.Client, live: Live) -> None:
    results = post(http, "/v1/classify", inputs=["plain", ["plain", "words"]])["results"]
    for result, texts in zip(results, (["plain"], ["plain", "words"]), strict=True):
        expected = theirs_logits(live, "classifier", *texts).softmax(dim=-1).tolist()
        assert result["scores"] == pytest.approx(dict(zip(("bad", "fine", "good"), expected, strict=True)), abs=1e-5)
        assert result["labels"] == [max(result["scores"], key=result["scores"].__getitem__)]


def test_tag_equals_transformers(http: httpx.Client, live: Live) -> None:
    theirs: Any = pipeline("token-classification", model=live.theirs["tagger"], tokenizer=live.tokenizer, device="cpu")
    (tags,) = post(http, "/v1/tag", inputs=TEXTS[0], level="tokens")["results"]
    assert [(tag["label"], tag["start"], tag["end"]) for tag in tags] == [
        (tag["entity"], tag["start"], tag["end"]) for tag in theirs(TEXTS[0], ignore_labels=[])
    ]
    (words,) = post(http, "/v1/tag", inputs=[["plain", "words"]], level="words")["results"]
    assert [(word["text"], word["start"], word["end"]) for word in words] == [("plain", 0, 1), ("words", 1, 2)]


def test_answer_equals_the_best_span_of_transformers(http: httpx.Client, live: Live) -> None:
    question, context = "plain ?", "two words are here plain"
    encoded = live.tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    spans, kinds = encoded.pop("offset_mapping")[0].tolist(), encoded["token_type_ids"][0].tolist()
    with torch.inference_mode():
        out = live.theirs["answerer"](**encoded)
    places = [place for place, kind in enumerate(kinds) if kind == 1][:-1]
    sums = {
        (first, last): float(out.start_logits[0, first] + out.end_logits[0, last])
        for first in places
        for last in places
        if first <= last
    }
    first, last = max(sums, key=sums.__getitem__)
    (result,) = post(http, "/v1/answer", inputs={"question": question, "context": context}, n_best=3)["results"]
    assert (result["start"], result["end"]) == (spans[first][0], spans[last][1])
    assert result["text"] == context[result["start"] : result["end"]]
    assert result["score"] == pytest.approx(max(sums.values()), abs=1e-4)
    assert result["no_answer_score"] == pytest.approx(float(out.start_logits[0, 0] + out.end_logits[0, 0]), abs=1e-4)
    assert len(result["best"]) == 3


def test_fill_mask_equals_transformers(http: httpx.Client, live: Live) -> None:
    encoded = live.tokenizer("plain [MASK] are [MASK]", return_tensors="pt")
    probabilities = live.theirs["language"](**encoded).logits[0].softmax(dim=-1)
    masks = (encoded["input_ids"][0] == live.tokenizer.mask_token_id).nonzero()[:, 0]
    (found,) = post(http, "/v1/fill-mask", inputs="plain [MASK] are [MASK]", top_k=3)["results"]
    assert len(found) == 2
    for fillings, mask in zip(found, masks, strict=True):
        scores, ids = probabilities[mask].topk(3)
        assert [filling["id"] for filling in fillings] == ids.tolist()
        assert [filling["score"] for filling in fillings] == pytest.approx(scores.tolist(), abs=1e-5)


def test_tokenize_and_similarity(http: httpx.Client, live: Live) -> None:
    tokens = post(http, "/v1/tokenize", inputs=TEXTS)["results"]
    assert [[token["id"] for token in row] for row in tokens] == live.tokenizer(TEXTS)["input_ids"]
    names = live.tokenizer.convert_ids_to_tokens(live.tokenizer(TEXTS[0])["input_ids"])
    assert [token["token"] for token in tokens[0]] == names
    vectors = theirs_mean(live, [*TEXTS, "here"]).numpy()
    matrix = post(http, "/v1/similarity", inputs=TEXTS)["results"]
    np.testing.assert_allclose(matrix, vectors[:2] @ vectors[:2].T, atol=1e-5)
    matrix = post(http, "/v1/similarity", inputs=TEXTS, others=["here"])["results"]
    np.testing.assert_allclose(matrix, vectors[:2] @ vectors[2:].T, atol=1e-5)


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b'{"inputs": NaN}', "application/json", 400),
        (b'{"inputs": "\xff"}', "application/json", 400),
        (b'{"inputs": "\\ud800"}', "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b"", "application/json", 400),
        (b'{"inputs": "plain"}', "text/plain", 415),
        (b'{"inputs": "plain"}', None, 415),
        (b'{"inputs": "plain"}', "application/json; charset=utf-8", 200),
    ],
)
def test_bodies_that_are_not_json(http: httpx.Client, content: bytes, kind: str | None, status: int) -> None:
    headers = {"Content-Type": kind} if kind else {}
    assert http.post("/v1/embed", content=content, headers=headers).status_code == status


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "99999999"])
def test_a_deadline_must_be_a_number(http: httpx.Client, value: str) -> None:
    answer = http.post("/v1/embed", json={"inputs": "plain"}, headers={"X-Timeout-Ms": value})
    assert (answer.status_code, "X-Timeout-Ms is" in answer.text) == (422, True)


def test_wrong_paths_and_methods(http: httpx.Client) -> None:
    assert http.get("/v1/embed").status_code == 405
    assert http.get("/v1/embed").json()["error"]["message"] == "/v1/embed does not take GET."
    assert http.post("/v1/nothing", json={}).json()["error"]["type"] == "not_found_error"
    assert http.get("/v2/nothing").json() == {"message": "There is no route /v2/nothing; /docs lists them."}


# ---------------------------------------------------------------------- what the scheduler says


class StubScheduler:
    """A scheduler that raises an error, or never ends, as a test says."""

    is_ready = False

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.timeouts: list[float | None] = []
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def start(self) -> None:
        pass

    async def drain(self, seconds: float) -> None:
        pass

    async def run(self, *_: Any, timeout: float | None = None, **__: Any) -> Any:
        self.timeouts.append(timeout)
        if self.error is not None:
            raise self.error
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture(scope="module")
def stub(live: Live) -> Iterator[tuple[StubScheduler, str]]:
    scheduler: Any = StubScheduler()
    with listen(make_app(live.models, scheduler, ServeSettings()), scheduler) as url:
        yield scheduler, url


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("The queue is full.", 2.3), 429, "overloaded"),
        (DeadlineExceeded("Too late."), 504, "deadline_exceeded"),
        (WorkerLost("The worker died."), 503, "worker_lost"),
        (ShuttingDown("The server stops."), 503, "shutting_down"),
        (ValueError("Text 0 is too long."), 422, None),
        (RuntimeError("secret details"), 500, None),
    ],
)
def test_every_error_has_its_status(stub: tuple[StubScheduler, str], error: Exception, status: int, code: Any) -> None:
    scheduler, url = stub
    scheduler.error = error
    answer = httpx.post(f"{url}/v1/embed", json={"inputs": "plain"}, headers={"X-Timeout-Ms": "1500"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("secret" in answer.text, str(error) in answer.text) == (False, status != 500)
    assert answer.headers.get("retry-after") == ("3" if status == 429 else None)
    assert scheduler.timeouts[-1] == 1.5


def test_a_server_that_is_not_ready_is_alive(stub: tuple[StubScheduler, str]) -> None:
    _, url = stub
    assert [httpx.get(url + path).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 503]
    assert httpx.get(f"{url}/health").json()["error_type"] == "Unhealthy"


def test_the_work_of_a_client_that_leaves_is_cancelled(stub: tuple[StubScheduler, str]) -> None:
    scheduler, url = stub
    scheduler.error = None
    body = json.dumps({"inputs": "plain"}).encode()
    head = (
        f"POST /v1/embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + body)
        assert scheduler.started.wait(20)
        time.sleep(0.05)
        assert not scheduler.cancelled.is_set()
    assert scheduler.cancelled.wait(20)
    assert httpx.get(f"{url}/live").status_code == 200
