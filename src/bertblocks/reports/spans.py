"""Predictions of spans: entities in their sentences, and answers in their passages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from bertblocks.reports.charts import bar_chart, matrix_chart
from bertblocks.reports.page import Html, figures, join, paragraph, section, table
from bertblocks.reports.prediction_parts import SHOWN, Record, by_label, by_length, show_text


def tagging_sections(records: Sequence[Record]) -> Html:
    real, found = ([set(find_spans(record[side])) for record in records] for side in ("gold", "predicted"))
    wrong = [len(a ^ b) for a, b in zip(real, found, strict=True)]
    worst = sorted((i for i in range(len(records)) if wrong[i]), key=lambda i: -wrong[i])[:SHOWN]
    rows = [
        (wrong[i], _mark(records[i], real[i], found[i], "gold"), _mark(records[i], found[i], real[i], "predicted"))
        for i in worst
    ]
    counts: Counter[tuple[str, str]] = Counter()
    for a, b in zip(real, found, strict=True):
        at = {span[:2]: span[2] for span in b}
        counts.update((span[2], at.get(span[:2], "(none)")) for span in a)
        known = {span[:2] for span in a}
        counts.update(("(none)", span[2]) for span in b if span[:2] not in known)
    labels = sorted({label for pair in counts for label in pair})
    matrix = matrix_chart("Confusion matrix of spans", labels, [[counts[a, b] for b in labels] for a in labels])
    quality = [1 - min(1.0, count / max(len(a | b), 1)) for count, a, b in zip(wrong, real, found, strict=True)]
    legend = "Green: right. Blue underline: gold only. Orange: predicted only."
    return join(
        section("Quality by label", *by_label(real, found, lambda span: span[2])),
        section("Confusion matrix", figures([matrix], is_wide=True)),
        section("Length", figures(by_length(records, quality))),
        section(
            "Worst examples",
            paragraph(legend, "quiet"),
            table(["mistakes", "gold", "predicted"], rows, is_searchable=True),
        ),
    )


def find_spans(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """The entities of BIO tags as first word, word after the last, and kind; each word itself if tags are plain.

    Example:
        >>> find_spans(["O", "B-PER", "I-PER"]), find_spans(["NOUN"])
        ([(1, 3, 'PER')], [(0, 1, 'NOUN')])
    """
    spans: list[tuple[int, int, str]] = []
    for index, tag in enumerate(tags):
        mark, dash, kind = tag.partition("-")
        if tag == "O":
            continue
        if dash and mark == "I" and spans and spans[-1][1] == index and spans[-1][2] == kind:
            spans[-1] = (spans[-1][0], index + 1, kind)
        else:
            spans.append((index, index + 1, kind if dash and mark in ("B", "I") else tag))
    return spans


def _mark(record: Record, own: set[tuple[int, int, str]], other: set[tuple[int, int, str]], side: str) -> Html:
    """The text with its spans; those that the other side has too are right."""
    text, words, html, end = record["text"], record["words"], "", 0
    for first, last, kind in sorted(own):
        start, stop = words[first][0], words[last - 1][1]
        name = "right" if (first, last, kind) in other else side
        html += (
            f"{escape(text[end:start])}<mark class={name}>{escape(text[start:stop])}<sup>{escape(kind)}</sup></mark>"
        )
        end = stop
    return Html(f'<span dir="auto">{html}{escape(text[end:])}</span>')


def answering_sections(records: Sequence[Record]) -> Html:
    groups = [
        ("wrong", sorted((r for r in records if r["f1"] < 1), key=lambda r: r["f1"])),
        ("uncertain", sorted(records, key=lambda r: abs(r["score"] - r["no_answer_score"]))),
    ]
    rows = [
        (
            name,
            round(100 * r["f1"], 1),
            show_text(r["question"]),
            " | ".join(answer["text"] for answer in r["gold"]) or "(no answer)",
            r["predicted"]["text"] or "(no answer)",
            _passage(r),
        )
        for name, chosen in groups
        for r in chosen[: SHOWN // 2]
    ]
    shares = Counter("exact" if r["f1"] == 1 else "partly" if r["f1"] > 0 else "wrong" for r in records)
    charts = [
        bar_chart("Questions by result", {name: float(shares[name]) for name in ("exact", "partly", "wrong")}),
        *by_length(records, [record["f1"] for record in records], "lost F1"),
    ]
    legend = "Green: in both spans. Blue underline: gold only. Orange: predicted only."
    columns = ["why", "F1", "question", "gold", "predicted", "passage"]
    return join(
        section("Answers", figures(charts)),
        section("Examples", paragraph(legend, "quiet"), table(columns, rows, is_searchable=True, filters=["why"])),
    )


def _passage(record: Record) -> Html:
    """The passage with the gold and the predicted span."""
    text, found = record["context"], record["predicted"]
    spans = {"gold": [(answer["start"], answer["end"]) for answer in record["gold"][:1]], "predicted": []}
    if found["text"]:
        spans["predicted"].append((found["start"], found["end"]))
    cuts = sorted({0, len(text), *(edge for side in spans.values() for span in side for edge in span)})
    html = ""
    for start, end in pairwise(cuts):
        inside = [side for side, found in spans.items() if any(a <= start and end <= b for a, b in found)]
        kind = "right" if len(inside) == 2 else inside[0] if inside else ""
        part = escape(text[start:end])
        html += f"<mark class={kind}>{part}</mark>" if kind else part
    return Html(f'<div class="passage" dir="auto">{html}</div>')
