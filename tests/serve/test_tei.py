"""TEI's routes, called with huggingface_hub's client and compared with transformers on the same weights."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

import bertblocks
from tests.serve.live import MAX_INPUTS, Live, theirs_hidden, theirs_logits, theirs_mean

TEXTS = ["plain words are here", "two leading"]
LONG = "plain words are here " * 20


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets huggingface_hub's client reach the server, which is on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_feature_extraction_equals_transformers(live: Live) -> None:
    expected = theirs_mean(live, TEXTS)
    for path in ("", "/embed"):
        client = InferenceClient(model=live.url + path)
        np.testing.assert_allclose(client.feature_extraction(TEXTS), expected, atol=1e-5)
        np.testing.assert_allclose(client.feature_extraction(TEXTS[0], prompt_name="query"), expected[:1], atol=1e-5)
        means = np.stack([theirs_hidden(live, text).mean(dim=0) for text in TEXTS])
        found = client.feature_extraction(TEXTS, normalize=False, truncate=True, truncation_direction="right")
        np.testing.assert_allclose(found, means, atol=1e-5)


def test_sentence_similarity_is_the_cosine(live: Live) -> None:
    vectors = theirs_mean(live, ["plain", *TEXTS])
    found = InferenceClient(model=f"{live.url}/similarity").sentence_similarity("plain", TEXTS)
    assert found == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-5)


def test_text_classification_gives_the_best_label(live: Live) -> None:
    probabilities = theirs_logits(live, "classifier", TEXTS[0]).softmax(dim=-1)
    found: Any = InferenceClient(model=f"{live.url}/predict").text_classification(TEXTS[0], top_k=1)
    assert found.label == ("bad", "fine", "good")[int(probabilities.argmax())]
    assert found.score == pytest.approx(float(probabilities.max()), abs=1e-5)


def test_predict_takes_texts_and_pairs(http: httpx.Client, live: Live) -> None:
    pair = theirs_logits(live, "classifier", "plain", "words")
    for inputs, is_batch in ((["plain", "words"], False), ([["plain", "words"], ["plain"]], True)):
        answer = http.post("/predict", json={"inputs": inputs, "raw_scores": True}).json()
        first = answer[0] if is_batch else answer
        assert {item["label"]: item["score"] for item in first} == pytest.approx(
            dict(zip(("bad", "fine", "good"), pair.tolist(), strict=True)), abs=1e-4
        )
    one = http.post("/predict", json={"inputs": "plain", "model": "reranker"}).json()
    logit = theirs_logits(live, "reranker", "plain")
    assert one[0]["score"] == pytest.approx(float(logit.sigmoid()), abs=1e-5)


def test_rerank_scores_are_the_sigmoid_or_the_logits(http: httpx.Client, live: Live) -> None:
    logits = [float(theirs_logits(live, "reranker", "plain words", text)) for text in TEXTS]
    order = sorted(range(2), key=lambda index: -logits[index])
    body = {"query": "plain words", "texts": TEXTS}
    answer = http.post("/rerank", json={**body, "raw_scores": True, "return_text": True}).json()
    assert [item["index"] for item in answer] == order
    assert [item["text"] for item in answer] == [TEXTS[index] for index in order]
    assert [item["score"] for item in answer] == pytest.approx([logits[index] for index in order], abs=1e-4)
    answer = http.post("/rerank", json=body).json()
    expected = [1 / (1 + np.exp(-logits[index])) for index in order]
    assert [item["score"] for item in answer] == pytest.approx(expected, abs=1e-5)
    assert "text" not in answer[0]


def test_embed_all_gives_every_token(http: httpx.Client, live: Live) -> None:
    answer = http.post("/embed_all", json={"inputs": TEXTS}).json()
    for text, vectors in zip(TEXTS, answer, strict=True):
        np.testing.assert_allclose(vectors, theirs_hidden(live, text), atol=1e-4)


def test_embed_sparse_is_splade(http: httpx.Client, live: Live) -> None:
    logits = live.theirs["language"](**live.tokenizer(TEXTS[0], return_tensors="pt")).logits[0]
    expected = logits.relu().log1p().amax(dim=0).detach().numpy()
    answer = http.post("/embed_sparse", json={"inputs": TEXTS[0]}).json()
    found = np.zeros_like(expected)
    for item in answer[0]:
        found[item["index"]] = item["value"]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_tokenize_and_decode(http: httpx.Client, live: Live) -> None:
    encoded = live.tokenizer(TEXTS[0], return_offsets_mapping=True)
    (tokens,) = http.post("/tokenize", json={"inputs": TEXTS[0]}).json()
    assert [token["id"] for token in tokens] == encoded["input_ids"]
    assert [token["special"] for token in tokens] == [True, *[False] * (len(tokens) - 2), True]
    assert tokens[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    for token, span in list(zip(tokens, encoded["offset_mapping"], strict=True))[1:-1]:
        assert (token["start"], token["stop"]) == span
        assert token["text"] == TEXTS[0][slice(*span)]
    (bare,) = http.post("/tokenize", json={"inputs": TEXTS[0], "add_special_tokens": False}).json()
    assert [token["id"] for token in bare] == encoded["input_ids"][1:-1]
    long = http.post("/tokenize", json={"inputs": [LONG]}).json()[0]
    assert len(long) == len(live.tokenizer(LONG)["input_ids"])  # nothing is cut
    ids = encoded["input_ids"]
    assert http.post("/decode", json={"ids": ids}).json() == [live.tokenizer.decode(ids, skip_special_tokens=True)]
    answer = http.post("/decode", json={"ids": [ids, ids[:2]], "skip_special_tokens": False}).json()
    assert answer == [live.tokenizer.decode(ids), live.tokenizer.decode(ids[:2])]


def test_long_texts_are_cut_or_rejected_as_asked(http: httpx.Client, live: Live) -> None:
    cut = live.tokenizer(LONG, truncation=True, max_length=32, return_tensors="pt")
    expected = live.theirs["embedder"](**cut).last_hidden_state[0].mean(dim=0).detach()
    answer = http.post("/embed", json={"inputs": LONG, "truncate": True})
    np.testing.assert_allclose(answer.json()[0], expected / expected.norm(), atol=1e-5)
    assert answer.headers["x-compute-tokens"] == "32"
    rejected = http.post("/embed", json={"inputs": LONG, "truncate": False})
    assert (rejected.status_code, rejected.json()["error_type"]) == (422, "Validation")
    left = http.post("/embed", json={"inputs": LONG, "truncation_direction": "left"})
    assert (left.status_code, left.json()["error"]) == (
        422,
        "truncation_direction is 'left'; it must be 'right', because long texts are cut at their end.",
    )


def test_info_and_health(http: httpx.Client, live: Live) -> None:
    info = http.get("/info").json()
    assert info["model_id"] == "embedder"
    assert info["model_dtype"] == "float32"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["max_client_batch_size"]) == (32, MAX_INPUTS)
    assert info["version"] == bertblocks.__version__
    assert [model["id"] for model in info["models"]] == [model.name for model in live.models]
    assert [http.get(path).status_code for path in ("/health", "/ready", "/live")] == [200, 200, 200]


def test_headers_tell_the_time_of_each_stage(http: httpx.Client, live: Live) -> None:
    headers = http.post("/embed", json={"inputs": TEXTS}).headers
    assert headers["x-compute-characters"] == str(sum(map(len, TEXTS)))
    assert headers["x-compute-tokens"] == str(sum(len(live.tokenizer(text)["input_ids"]) for text in TEXTS))
    times = {name: float(headers[f"x-{name}-time"]) for name in ("total", "tokenization", "queue", "inference")}
    assert min(times.values()) >= 0
    assert times["total"] >= times["tokenization"] + times["queue"] + times["inference"] - 0.01
    assert headers["server-timing"].startswith(f"tokenize;dur={headers['x-tokenization-time']}, queue;dur=")


def test_errors_have_the_form_of_tei(http: httpx.Client, live: Live) -> None:
    many = http.post("/embed", json={"inputs": ["plain"] * 9})
    assert many.status_code == 413
    assert many.json() == {"error": "The request has 9 inputs; send at most 8 at a time.", "error_type": "Validation"}
    bodies: list[dict[str, Any]] = [{"inputs": []}, {"input": "plain"}, {"inputs": "plain", "normalize": "yes"}]
    for body in bodies:
        answer = http.post("/embed", json=body)
        assert (answer.status_code, set(answer.json())) == (422, {"error", "error_type"})
    assert "did you mean 'inputs'" in http.post("/embed", json={"input": "plain"}).json()["error"]
    neither = http.post("/rerank", json={"query": "plain"}).json()["error"]
    assert neither == "Give either texts, as in TEI, or documents, as in Cohere's API."
    with pytest.raises(HfHubHTTPError, match="422"):
        InferenceClient(model=f"{live.url}/embed").feature_extraction("plain", prompt_name="nobody")
