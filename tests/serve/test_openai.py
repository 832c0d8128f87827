"""OpenAI's routes, called with OpenAI's own client and compared with transformers on the same weights."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.serve.live import MAX_INPUTS, Live, theirs_logits, theirs_mean
from tests.tasks.test_predictor import TAGS

TEXTS = ["plain words are here", "two leading", ""]


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_embeddings_equal_transformers(client: openai.OpenAI, live: Live) -> None:
    answer = client.embeddings.create(model="embedder", input=TEXTS)  # the client asks for base64
    found = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(found, theirs_mean(live, TEXTS), atol=1e-5)
    tokens = sum(len(live.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert (answer.object, answer.model, [item.index for item in answer.data]) == ("list", "embedder", [0, 1, 2])


def test_every_form_of_input_and_encoding_gives_the_same_vector(client: openai.OpenAI, live: Live) -> None:
    ids = live.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    expected = theirs_mean(live, TEXTS[:1])[0]
    inputs: list[Any] = [TEXTS[0], [TEXTS[0]], ids, [ids]]
    for given in inputs:
        answer = client.embeddings.create(model="embedder", input=given, encoding_format="float", user="somebody")
        np.testing.assert_allclose(answer.data[0].embedding, expected, atol=1e-5)


def test_base64_is_little_endian_float32(http: httpx.Client, live: Live) -> None:
    answer = http.post("/v1/embeddings", json={"input": "plain", "encoding_format": "base64"}).json()
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, theirs_mean(live, ["plain"])[0], atol=1e-5)


def test_dimensions_cut_and_scale_vectors(client: openai.OpenAI, live: Live) -> None:
    whole = theirs_mean(live, TEXTS)[:, :8]
    answer = client.embeddings.create(model="embedder", input=TEXTS, dimensions=8)
    found = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(found, whole / whole.norm(dim=-1, keepdim=True), atol=1e-5)


def test_models_are_listed(client: openai.OpenAI, live: Live) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [model.name for model in live.models]
    tagger = client.models.retrieve("tagger").model_dump()
    assert (tagger["tasks"], tagger["labels"]) == (["embed", "tag"], TAGS)
    assert tagger["parameters"] == live.theirs["tagger"].num_parameters()
    assert client.models.retrieve("language").model_dump()["mask_token"] == "[MASK]"
    with pytest.raises(openai.NotFoundError, match="There is no model 'nobody'"):
        client.models.retrieve("nobody")


def test_errors_have_the_form_that_the_client_reads(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="did you mean 'embedder'") as missing:
        client.embeddings.create(model="embeder", input="plain")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.UnprocessableEntityError, match="tokens cannot do embed, only multi, rerank"):
        client.embeddings.create(model="tokens", input="plain")
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions is 33; it must be between 1 and 32"):
        client.embeddings.create(model="embedder", input="plain", dimensions=33)
    with pytest.raises(openai.UnprocessableEntityError, match="did you mean 'dimensions'"):
        client.embeddings.create(model="embedder", input="plain", extra_body={"dimension": 3})
    with pytest.raises(openai.UnprocessableEntityError, match="ids are between 0 and 119"):
        client.embeddings.create(model="embedder", input=[500])
    with pytest.raises(openai.APIStatusError, match=f"has 9 inputs; send at most {MAX_INPUTS}") as many:
        client.embeddings.create(model="embedder", input=["plain"] * 9)
    assert many.value.status_code == 413


@pytest.mark.parametrize("given", [[], "x", {}, {"input": []}, {"input": [[]]}, {"input": ["a", None]}, {"input": 3}])
def test_bodies_that_do_not_fit_are_rejected(http: httpx.Client, given: Any) -> None:
    answer = http.post("/v1/embeddings", json=given)
    assert answer.status_code == 422
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_infinity_aliases(http: httpx.Client, live: Live) -> None:
    body = {"input": ["plain"], "model": "embedder"}
    assert http.post("/embeddings", json=body).json() == http.post("/v1/embeddings", json=body).json()
    assert http.get("/models").json() == http.get("/v1/models").json()
    answer = http.post("/classify", json={"input": ["plain words", "here"]}).json()
    probabilities = theirs_logits(live, "classifier", "plain words").softmax(dim=-1).tolist()
    expected = sorted(zip(("bad", "fine", "good"), probabilities, strict=True), key=lambda item: -item[1])
    assert [item["label"] for item in answer["data"][0]] == [label for label, _ in expected]
    assert [item["score"] for item in answer["data"][0]] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert len(answer["data"]) == 2
