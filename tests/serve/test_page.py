"""The page in headless Chromium: every panel works, alone with the server, at any width and from the keyboard."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.reports.browser import CHROMIUM, Browser, open_browser
from tests.serve.page_server import PageServer, embed, overlap, run_server, token_vectors, words

pytest.importorskip("websocket")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

RUN = """(async () => {
  const panel = document.getElementById('panel-%(panel)s');
  document.getElementById('tab-%(panel)s').click();
  for (const [name, value] of Object.entries(%(values)s)) {
    const field = panel.querySelector(`[name="${name}"], [data-task="${name}"]`);
    field.value = value;
    field.dispatchEvent(new Event('change'));
  }
  panel.querySelector('.primary').click();
  while (panel.hasAttribute('aria-busy')) await new Promise((done) => setTimeout(done, 10));
  const shown = (selector) => [...panel.querySelectorAll(selector)];
  const text = (element) => element.innerText.trim();
  return {
    status: text(panel.querySelector('.status')),
    error: panel.querySelector('.error').hidden ? null : text(panel.querySelector('.error')),
    rows: shown('.out tbody').map((table) => [...table.rows].map((row) => [...row.cells].map(text))),
    lists: shown('.out ol').map((list) => [...list.children].map((item) => [...item.children].map(text))),
    marks: shown('.out mark').map((mark) => [...mark.children].map(text)),
    timing: shown('.timing li').map(text),
    text: text(panel.querySelector('.out')),
  };
})()"""


@pytest.fixture(scope="module")
def server() -> PageServer:
    return PageServer()


@pytest.fixture(scope="module")
def address(server: PageServer) -> Iterator[str]:
    with run_server(server.app) as url:
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def run(browser: Browser, panel: str, **values: str) -> dict[str, Any]:
    """Fills in a panel, presses its button and returns what it shows."""
    return browser.evaluate(RUN % {"panel": panel, "values": json.dumps(values)})


def wait(browser: Browser, condition: str) -> None:
    end = time.monotonic() + 20
    while not browser.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def press(browser: Browser, key: str, code: int, text: str = "", modifiers: int = 0) -> None:
    for kind in ("keyDown", "keyUp"):
        down = {"text": text} if text and kind == "keyDown" else {}
        browser.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key=key,
            code=key,
            windowsVirtualKeyCode=code,
            modifiers=modifiers,
            **down,
        )


@pytest.mark.parametrize(("width", "mode"), [(400, "light"), (400, "dark"), (820, "light"), (1600, "dark")])
def test_every_panel_runs_without_a_problem(browser: Browser, address: str, width: int, mode: str) -> None:
    assert browser.open(address, width, mode) == []
    panels = browser.evaluate("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.id.slice(4))")
    assert panels == ["embed", "search", "classify", "tag", "answer", "fill-mask", "sparse", "multi", "tokenize"]
    for panel in panels:
        shown = run(browser, panel)
        assert shown["error"] is None
        assert shown["text"], panel
        assert all("inference 5.9 ms" in line for line in shown["timing"])
        assert browser.problems(address) == [], panel


def test_similarities_are_cosines(browser: Browser, address: str) -> None:
    browser.open(address)
    texts = ["a cat sat", "the cat sat down", "rain in Spain", "the rain"]
    heat, pairs = run(browser, "embed", texts="\n\n".join(texts) + "\n")["rows"]
    vectors = np.stack([embed(text) for text in texts])
    truth = vectors @ vectors.T
    assert [[float(cell) for cell in row[1:]] for row in heat] == pytest.approx(truth.round(2), abs=0.0051)
    best = max((truth[i, j], i, j) for i in range(4) for j in range(i + 1, 4))
    assert pairs[0] == [f"{best[0]:.3f}", texts[best[1]], texts[best[2]]]
    assert len(pairs) == 6


def test_heat_cells_are_readable_in_both_modes(browser: Browser, address: str) -> None:
    script = """(() => {
      const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
      const light = (color) => {
        context.fillStyle = color; context.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((value) => {
          const share = value / 255;
          return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const cells = [...document.querySelectorAll('#panel-embed .heat tbody td:not(.self)')];
      return cells.map((cell) => {
        const style = getComputedStyle(cell), pair = [light(style.color), light(style.backgroundColor)].sort();
        return [(pair[1] + 0.05) / (pair[0] + 0.05), style.backgroundColor];
      });
    })()"""
    for mode in ("light", "dark"):
        browser.open(address, mode=mode)
        run(browser, "embed")
        cells = browser.evaluate(script)
        assert min(contrast for contrast, _ in cells) >= 4.5
        assert len({color for _, color in cells}) > 5


def test_search_shows_both_rankings_and_the_moves(browser: Browser, address: str) -> None:
    browser.open(address)
    query, texts = "rain in Spain", ["the rain it rains", "Spain", "a cat in the rain in Spain", "dogs"]
    plain, reranked = run(browser, "search", query=query, texts="\n".join(texts))["lists"]
    first = sorted(texts, key=lambda text: -float(embed(query) @ embed(text)))
    second = sorted(texts, key=lambda text: -overlap(query, text))
    assert [item[0] for item in plain] == first
    assert [item[0] for item in reranked] == second
    places = [first.index(text) - rank for rank, text in enumerate(second)]
    assert any(places)
    signs = [f"▲ {place}" if place > 0 else f"▼ {-place}" if place else "=" for place in places]
    assert [item[2] for item in reranked] == signs
    assert [float(item[1]) for item in reranked] == pytest.approx([overlap(query, t) for t in second], abs=0.0006)


def test_search_works_with_a_reranker_alone(browser: Browser) -> None:
    with run_server(PageServer([{"name": "only", "tasks": ["rerank"]}]).app) as url:
        assert browser.open(url) == []
        shown = run(browser, "search", query="rain", texts="sun\nrain")
        tabs = browser.evaluate("[...document.querySelectorAll('[role=tab]')].map((tab) => tab.innerText)")
    assert tabs == ["Search", "Tokenize"]
    assert shown["lists"] == [[["rain", "1.000"], ["sun", "0.000"]]]


def test_classes_of_texts_and_pairs(browser: Browser, address: str, server: PageServer) -> None:
    browser.open(address)
    (rows,) = run(browser, "classify", text="good")["rows"]
    assert [[row[0].split()[0], row[2]] for row in rows] == [
        *(["positive", "0.750"], ["neutral", "0.200"], ["negative", "0.050"])
    ]
    assert [("predicted" in row[0]) for row in rows] == [True, False, False]
    bars = "[...document.querySelectorAll('#panel-classify .bar')]"
    shares = f"{bars}.map((bar) => getComputedStyle(bar, '::before').width)"
    widths = [float(width.removesuffix("px")) for width in browser.evaluate(shares)]
    assert widths[1] / widths[0] == pytest.approx(0.2 / 0.75, rel=0.05)
    assert run(browser, "classify", text="a", second="b")["status"] == "Predicted: entailment."
    assert server.seen[-1] == ("/v1/classify", {"model": "reviews", "inputs": [["a", "b"]]})


def test_spans_count_characters_as_python_does(browser: Browser, address: str) -> None:
    browser.open(address)
    text = "🤗🤗 Anna\nmet שלום Bob in 2001 🇩🇪 Berlin"
    shown = run(browser, "tag", text=text)
    labels = [["Anna", "NAME"], ["Bob", "NAME"], ["2001", "NUMBER"], ["Berlin", "NAME"]]
    assert shown["marks"] == labels
    assert [row[:2] for row in shown["rows"][0]] == [[label, span] for span, label in labels]
    passage = browser.evaluate("document.querySelector('#panel-tag .passage').textContent")
    assert re.sub("NAME|NUMBER", "", passage) == text


def test_an_answer_is_marked_in_its_context(browser: Browser, address: str) -> None:
    browser.open(address)
    shown = run(browser, "answer", question="When?", context="🤗 In 1891 or 1903.")
    assert (shown["marks"], shown["status"]) == ([["1891", "answer"]], "Answer: 1891")
    assert shown["rows"] == [[["1", "1891", "5\u20139", "9.50"], ["2", "1903", "13\u201317", "8.50"]]]
    assert "\u22121.50" in shown["text"]
    none = run(browser, "answer", question="When?", context="Never.")
    assert (none["marks"], none["status"]) == ([], "The context does not have an answer.")


def test_masks_are_inserted_and_filled(browser: Browser, address: str) -> None:
    browser.open(address)
    script = """(() => {
      const text = document.getElementById('mask-text'), before = text.value;
      text.setSelectionRange(0, 3);
      document.getElementById('insert').click();
      return [before, text.value];
    })()"""
    before, after = browser.evaluate(script)
    assert before.count("<mask>") == 2
    assert after == "<mask>" + before[3:]
    shown = run(browser, "fill-mask")
    assert len(shown["rows"]) == 3
    assert [row[0] for row in shown["rows"][0]] == ["paris", "lyon", "(blank)"]


def test_sparse_weights_and_tokens(browser: Browser, address: str, server: PageServer) -> None:
    browser.open(address)
    (rows,) = run(browser, "sparse", text="to be photosynthesis", role="query")["rows"]
    assert [row[0] for row in rows] == ["photosynthesis", "be", "to"]
    assert server.seen[-1][1]["role"] == "query"
    (tokens,) = run(browser, "tokenize", text="né 🤗!")["lists"]
    assert [token for token, _ in tokens] == ["[CLS]", "né", "🤗", "!", "[SEP]"]


def test_maxsim_is_the_sum_of_the_best(browser: Browser, address: str) -> None:
    browser.open(address)
    query, text = "rain in Spain", "the rain falls"
    shown = run(browser, "multi", query=query, text=text)
    (_, rows), (_, columns) = token_vectors(query), token_vectors(text)
    scores = rows @ columns.T
    assert shown["status"].startswith(f"MaxSim: {scores.max(1).sum():.2f},")
    assert [row[0] for row in shown["rows"][0]] == ["[CLS]", *words(query.lower()), "[SEP]"]
    assert browser.evaluate("document.querySelectorAll('#panel-multi .best').length") == len(rows)


def test_the_keyboard_is_enough(browser: Browser, address: str, server: PageServer) -> None:
    browser.open(address)
    browser.evaluate("document.getElementById('tab-embed').focus()")
    press(browser, "ArrowRight", 39)
    assert browser.evaluate("document.activeElement.id") == "tab-search"
    press(browser, "Tab", 9)  # main can be reached by the skip link only
    assert browser.evaluate("document.activeElement.id") == "search-query"
    press(browser, "Enter", 13, "\r")
    wait(browser, "document.querySelectorAll('#panel-search .out li').length === 12")
    press(browser, "Tab", 9)
    before = len(server.seen)
    press(browser, "Enter", 13, "\r", modifiers=2)
    wait(browser, "!document.querySelector('#panel-search').hasAttribute('aria-busy')")
    assert len(server.seen) == before + 3
    assert browser.evaluate("location.hash") == "#search"


def test_the_chosen_model_and_prompt_are_sent(browser: Browser, address: str, server: PageServer) -> None:
    browser.open(address)
    assert browser.evaluate("document.getElementById('prompt-field').hidden")
    run(browser, "embed", embed="prompted-embedder")
    assert server.seen[-1][1]["model"] == "prompted-embedder"
    assert "prompt_name" not in server.seen[-1][1]
    assert not browser.evaluate("document.getElementById('prompt-field').hidden")
    script = """document.getElementById('embed-prompt').value = 'query';
      document.querySelector('#panel-embed .primary').click()"""
    browser.evaluate(script)
    wait(browser, "!document.querySelector('#panel-embed').hasAttribute('aria-busy')")
    assert server.seen[-1][1]["prompt_name"] == "query"


def test_errors_are_sentences_and_text_stays_text(browser: Browser, address: str) -> None:
    browser.open(address)
    for panel in ("embed", "search"):
        shown = run(browser, panel, texts="fail 422")
        assert (shown["error"], shown["text"]) == ("The text is <b>bad</b>: status 422.", "")
    assert run(browser, "embed", texts="fail 429")["error"].endswith("status 429. Try again in 3 s.")
    assert run(browser, "embed", texts="fine\nagain")["error"] is None
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>‮ مرحبا"
    for panel, field in (("embed", "texts"), ("search", "texts"), ("tag", "text"), ("tokenize", "text")):
        shown = run(browser, panel, **{field: f"{hostile}\n{hostile} again"})
        assert shown["error"] is None
        assert "<script>" in shown["text"] or panel == "tokenize"
        assert browser.evaluate(f"document.querySelectorAll('#panel-{panel} :is(img, script)').length") == 0


def test_long_inputs_stay_inside_the_window(browser: Browser, address: str) -> None:
    browser.open(address, 400)
    word = "w" * 3000
    for panel, field in (
        ("embed", "texts"),
        ("search", "texts"),
        ("tag", "text"),
        ("sparse", "text"),
        ("multi", "text"),
    ):
        shown = run(browser, panel, **{field: f"{word} x\nW{word} y"})
        assert shown["error"] is None
        assert browser.problems(address) == [], panel
    shown = run(browser, "embed", texts="\n".join(f"sentence {number}" for number in range(60)))
    assert len(shown["rows"][0]) == 40
    assert "first 40 of 60 sentences" in shown["text"]
    shown = run(browser, "tokenize", text="a " * 5000)
    assert len(shown["lists"][0]) == 2000
    assert "5,002 tokens" in shown["text"]


def test_a_key_is_asked_for_and_kept(browser: Browser) -> None:
    server = PageServer(key="secret")
    with run_server(server.app) as url:
        browser.open(url)
        assert browser.evaluate("document.activeElement.id") == "key-value"
        assert "key is missing" in browser.evaluate("document.getElementById('problem').innerText")
        for value in ("wrong", "secret"):
            browser.evaluate(f"document.getElementById('key-value').value = '{value}'")
            browser.evaluate("document.querySelector('#key button').click()")
            time.sleep(0.3)
        wait(browser, "document.querySelectorAll('[role=tab]').length === 9")
        assert browser.evaluate("document.getElementById('key').hidden && document.getElementById('problem').hidden")
        assert run(browser, "embed")["error"] is None
        server.key = "changed"
        assert run(browser, "embed")["error"] == "The API key is missing or wrong."
        assert not browser.evaluate("document.getElementById('key').hidden")
        server.key = "secret"
        browser.open(url)
        assert browser.evaluate("document.querySelectorAll('[role=tab]').length") == 9


def test_numbers_are_polled_only_while_the_page_is_seen(browser: Browser, address: str, server: PageServer) -> None:
    browser.open(address)
    start = server.polls
    wait(browser, "document.querySelector('[data-stat=p50_ms] polyline')?.getAttribute('points').includes(' ')")
    assert server.polls > start
    assert browser.evaluate("document.querySelector('[data-stat=p50_ms]').innerText").endswith("ms")
    hide = """Object.defineProperty(document, 'hidden', {value: %s, configurable: true});
      document.dispatchEvent(new Event('visibilitychange'))"""
    browser.evaluate(hide % "true")
    time.sleep(0.2)
    hidden = server.polls
    time.sleep(2.5)
    assert server.polls == hidden
    browser.evaluate(hide % "false")
    time.sleep(0.5)
    assert server.polls > hidden


def test_a_request_is_copied_as_a_command(browser: Browser, address: str) -> None:
    browser.open(address)
    script = """(async () => {
      let copied = '';
      Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) => { copied = text; }}});
      document.getElementById('tab-tag').click();
      document.getElementById('tag-text').value = `It's "$HOME"\\nBob`;
      [...document.querySelectorAll('#panel-tag button')].at(-1).click();
      return copied;
    })()"""
    command = shlex.split(browser.evaluate(script).replace("\\\n", " "))
    assert command[:2] == ["curl", f"{address}v1/tag"]
    assert json.loads(command[-1]) == {"model": "entities", "inputs": ['It\'s "$HOME"\nBob']}


def test_a_server_that_is_gone_is_reported(browser: Browser) -> None:
    with run_server(PageServer().app) as url:
        browser.open(url)
    assert run(browser, "embed")["error"] == "The server cannot be reached."
