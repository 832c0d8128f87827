"""What the predictions of an evaluation show: quality by label, confusions, calibration, and the worst examples.

Each kind of prediction has its parts here. `prediction_sections` finds the kind in the keys of the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from bertblocks.reports.charts import Chart, bar_chart, matrix_chart, scatter_chart
from bertblocks.reports.page import Html, figures, join, paragraph, section, table

Record = Mapping[str, Any]
#: How many examples a table shows of each kind, such as the worst.
SHOWN = 100
#: Groups in charts of calibration and of errors by length.
GROUPS = 10
#: Bars in a chart of labels; the table below it has all of them.
MAX_BARS = 100
#: Points in a chart of scored pairs.
MAX_DOTS = 2000


def prediction_sections(records: Sequence[Record]) -> Html:
    """Charts and tables of the predictions, in reading order."""
    if not records:
        return Html("")
    first = records[0]
    if "words" in first:
        return _tagging(records)
    if "context" in first:
        return _answering(records)
    if "cosine" in first:
        return _similarity(records)
    if "rank" in first:
        return _retrieval(records)
    if "probabilities" in first:
        return _multi_label(records)
    if "probability" in first:
        return _classes(records)
    return _regression(records)


# ---------------------------------------------------------------------- labels


def _classes(records: Sequence[Record]) -> Html:
    counts = Counter((record["gold"], record["predicted"]) for record in records)
    labels = sorted({label for pair in counts for label in pair})
    real = [{record["gold"]} for record in records]
    found = [{record["predicted"]} for record in records]
    matrix = matrix_chart("Confusion matrix", labels, [[counts[a, b] for b in labels] for a in labels])
    pairs = [(a, b, count) for (a, b), count in counts.most_common() if a != b]
    groups = [
        ("wrong", sorted((r for r in records if r["gold"] != r["predicted"]), key=lambda r: -r["probability"])),
        ("uncertain", sorted(records, key=lambda r: r["probability"])),
        ("most certain", sorted(records, key=lambda r: -r["probability"])),
    ]
    rows = [
        (name, _text(r["text"]), r["gold"], r["predicted"], round(r["probability"], 3), round(r["gold_probability"], 3))
        for name, chosen in groups
        for r in chosen[: SHOWN if name != "most certain" else SHOWN // 4]
    ]
    columns = ["why", "text", "gold", "predicted", "probability", "of the gold label"]
    is_right = [float(r["gold"] == r["predicted"]) for r in records]
    return join(
        section("Quality by label", *_by_label(real, found)),
        section(
            "Confusion matrix",
            figures([matrix], is_wide=True),
            section("Most common confusions", table(["gold", "predicted", "count"], pairs, True), is_folded=True),
        ),
        section("Calibration and length", figures([*_calibration(records, is_right), *_by_length(records, is_right)])),
        section("Examples", table(columns, rows, is_searchable=True, filters=["why", "gold", "predicted"])),
    )


def _multi_label(records: Sequence[Record]) -> Html:
    real, found = ([set(record[side]) for record in records] for side in ("gold", "predicted"))

    def doubt(record: Record) -> float:
        return min((abs(share - 0.5) for share in record["probabilities"].values()), default=1.0)

    wrong = sorted(
        (r for r in records if set(r["gold"]) != set(r["predicted"])),
        key=lambda r: -len(set(r["gold"]) ^ set(r["predicted"])),
    )
    rows = [
        (name, _text(r["text"]), ", ".join(r["gold"]), ", ".join(r["predicted"]), round(doubt(r), 3))
        for name, chosen in (("wrong", wrong), ("uncertain", sorted(records, key=doubt)))
        for r in chosen[:SHOWN]
    ]
    is_right = [float(a == b) for a, b in zip(real, found, strict=True)]
    columns = ["why", "text", "gold", "predicted", "distance from the threshold"]
    return join(
        section("Quality by label", *_by_label(real, found)),
        section("Length", figures(_by_length(records, is_right))),
        section("Examples", table(columns, rows, is_searchable=True, filters=["why"])),
    )


def label_scores(real: Sequence[set], found: Sequence[set], kind: Callable[[Any], str] = str) -> list[dict[str, Any]]:
    """Precision, recall and F1 of each label, worst first; `kind` names the label of an item.

    Example:
        >>> label_scores([{"a"}, {"b"}], [{"a"}, {"a"}])[1]
        {'label': 'a', 'precision': 0.5, 'recall': 1.0, 'F1': 0.6666666666666666, 'examples': 1, 'predicted': 2}
    """
    hits, num_real, num_found = (
        Counter(kind(item) for items in side for item in items)
        for side in ([a & b for a, b in zip(real, found, strict=True)], real, found)
    )
    rows = [
        {
            "label": label,
            "precision": hits[label] / max(num_found[label], 1),
            "recall": hits[label] / max(num_real[label], 1),
            "F1": 2 * hits[label] / max(num_real[label] + num_found[label], 1),
            "examples": num_real[label],
            "predicted": num_found[label],
        }
        for label in sorted({*num_real, *num_found})
    ]
    return sorted(rows, key=lambda row: row["F1"])


def _by_label(real: Sequence[set], found: Sequence[set], kind: Callable[[Any], str] = str) -> list[Html]:
    rows = label_scores(real, found, kind)
    if not rows:
        return []
    details = {
        row["label"]: {key: round(row[key], 4) for key in ("precision", "recall", "examples", "predicted")}
        for row in rows
    }
    bars = {row["label"]: row["F1"] for row in rows[:MAX_BARS]}
    title = "F1 by label, worst first" + (f" ({MAX_BARS} of {len(rows)})" if len(rows) > MAX_BARS else "")
    numbers = table(list(rows[0]), [list(row.values()) for row in rows], is_searchable=True)
    is_short = len(rows) <= 12
    return [
        figures([bar_chart(title, bars, "F1", details)], is_wide=True),
        numbers if is_short else section("Table", numbers, is_folded=True),
    ]


# ---------------------------------------------------------------------- calibration and length


def _calibration(records: Sequence[Record], is_right: Sequence[float]) -> list[Chart]:
    """Accuracy by the model's own probability, and the mean distance between them (Guo et al., 2017)."""
    order = sorted(range(len(records)), key=lambda i: records[i]["probability"])
    points, error = [], 0.0
    for group in _split(order):
        confidence = sum(records[i]["probability"] for i in group) / len(group)
        accuracy = sum(is_right[i] for i in group) / len(group)
        error += abs(confidence - accuracy) * len(group) / len(order)
        points.append({"confidence": confidence, "accuracy": accuracy, "examples": len(group)})
    chart = scatter_chart("Calibration", points, "confidence", "accuracy", size="examples", diagonal=True)
    note = f"Expected calibration error {error:.3f}. On the dashed line the model is right as often as it says."
    return [Chart(chart.title, chart.spec, note=note)]


def _by_length(records: Sequence[Record], quality: Sequence[float], name: str = "error rate") -> list[Chart]:
    """The mean of 1 - quality by length of the text, in groups of equally many examples."""
    lengths = [len(_length_text(record)) for record in records]
    order = sorted(range(len(records)), key=lambda i: lengths[i])
    points = [
        {
            "characters": sum(lengths[i] for i in group) / len(group),
            name: 1 - sum(quality[i] for i in group) / len(group),
            "examples": len(group),
        }
        for group in _split(order)
    ]
    chart = scatter_chart(f"{name.capitalize()} by length of the text", points, "characters", name, size="examples")
    return [chart]


def _length_text(record: Record) -> str:
    if "texts" in record:
        return " ".join(record["texts"])
    return record.get("text") or record.get("context") or record.get("query") or ""


def _split(order: Sequence[int]) -> list[Sequence[int]]:
    """Up to `GROUPS` parts of about the same size."""
    count = min(GROUPS, max(1, len(order) // 5))
    bounds = [round(number * len(order) / count) for number in range(count + 1)]
    return [order[a:b] for a, b in pairwise(bounds) if b > a]


# ---------------------------------------------------------------------- numbers and pairs


def _regression(records: Sequence[Record]) -> Html:
    worst = sorted(records, key=lambda r: -abs(r["gold"] - r["predicted"]))
    rows = [(_text(r["text"]), r["gold"], r["predicted"], abs(r["gold"] - r["predicted"])) for r in worst[:SHOWN]]
    points = [{"gold": r["gold"], "predicted": r["predicted"], "text": _short(r["text"])} for r in records[:MAX_DOTS]]
    far = max((abs(r["gold"] - r["predicted"]) for r in records), default=1.0) or 1.0
    closeness = [1 - abs(r["gold"] - r["predicted"]) / far for r in records]
    charts = [
        scatter_chart("Predicted against gold", points, "gold", "predicted"),
        *_by_length(records, closeness, f"error, relative to the largest ({far:.3g})"),
    ]
    return join(
        section("Numbers", figures(charts)),
        section("Worst examples", table(["text", "gold", "predicted", "error"], rows, is_searchable=True)),
    )


def _similarity(records: Sequence[Record]) -> Html:
    points = [
        {"gold": r["gold"], "cosine": r["cosine"], "first": _short(r["texts"][0]), "second": _short(r["texts"][1])}
        for r in records[:MAX_DOTS]
    ]
    gold_rank, cosine_rank = (_ranks([r[key] for r in records]) for key in ("gold", "cosine"))
    gap = [a - b for a, b in zip(gold_rank, cosine_rank, strict=True)]
    order = range(len(records))
    groups = [
        ("rank differs", sorted(order, key=lambda i: -abs(gap[i]))[:SHOWN]),
        ("nearest", sorted(order, key=lambda i: -records[i]["cosine"])[: SHOWN // 2]),
        ("farthest", sorted(order, key=lambda i: records[i]["cosine"])[: SHOWN // 2]),
    ]
    rows = [
        (name, *map(_text, records[i]["texts"]), records[i]["gold"], round(records[i]["cosine"], 4), round(gap[i], 3))
        for name, chosen in groups
        for i in chosen
    ]
    columns = ["why", "first text", "second text", "gold", "cosine", "rank by gold - by cosine"]
    closeness = [1 - abs(difference) for difference in gap]
    charts = [
        scatter_chart("Cosine against the gold score", points, "gold", "cosine"),
        *_by_length(records, closeness, "difference of ranks"),
    ]
    note = "Ranks are shares: 1 is the most similar pair."
    return join(
        section("Pairs", figures(charts)),
        section("Examples", paragraph(note, "quiet"), table(columns, rows, is_searchable=True, filters=["why"])),
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value as a share; equal values share their mean rank.

    Example:
        >>> _ranks([5.0, 1.0, 5.0])
        [0.75, 0.0, 0.75]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    places: dict[float, list[int]] = {}
    for place, i in enumerate(order):
        places.setdefault(values[i], []).append(place)
    last = max(len(values) - 1, 1)
    return [sum(places[value]) / len(places[value]) / last for value in values]


def _retrieval(records: Sequence[Record]) -> Html:
    names = ["1", "2", "3", "4 to 10", "11 to 100", "above 100"]
    counts = Counter(names[_rank_group(record["rank"])] for record in records)
    ranks = bar_chart("Rank of the right text", {name: float(counts[name]) for name in names}, "queries")
    points = [
        {"nearest": r["nearest_cosine"], "right text": r["gold_cosine"], "query": _short(r["query"])}
        for r in records[:MAX_DOTS]
    ]
    cosines = scatter_chart("Cosine of the right text against that of the nearest", points, "nearest", "right text")
    gap = [r["nearest_cosine"] - r["gold_cosine"] for r in records]
    order = sorted(range(len(records)), key=lambda i: (-records[i]["rank"], -gap[i]))
    nearest = sorted(range(len(records)), key=lambda i: -records[i]["gold_cosine"])[: SHOWN // 2]
    farthest = sorted(range(len(records)), key=lambda i: records[i]["gold_cosine"])[: SHOWN // 2]
    rows = [
        (name, *texts, r["rank"], round(r["gold_cosine"], 4), round(r["nearest_cosine"], 4))
        for name, chosen in (("worst rank", order[:SHOWN]), ("nearest", nearest), ("farthest", farthest))
        for r in (records[i] for i in chosen)
        if (texts := [_text(r[key]) for key in ("query", "gold", "nearest")])
    ]
    columns = ["why", "query", "right text", "nearest text", "rank", "cosine of the right text", "of the nearest"]
    is_right = [float(record["rank"] == 1) for record in records]
    return join(
        section("Retrieval", figures([ranks, cosines, *_by_length(records, is_right)])),
        section("Examples", table(columns, rows, is_searchable=True, filters=["why"])),
    )


def _rank_group(rank: int) -> int:
    return rank - 1 if rank <= 3 else 3 if rank <= 10 else 4 if rank <= 100 else 5


# ---------------------------------------------------------------------- spans


def _tagging(records: Sequence[Record]) -> Html:
    real, found = ([set(_spans(record[side])) for record in records] for side in ("gold", "predicted"))
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
        section("Quality by label", *_by_label(real, found, lambda span: span[2])),
        section("Confusion matrix", figures([matrix], is_wide=True)),
        section("Length", figures(_by_length(records, quality))),
        section(
            "Worst examples",
            paragraph(legend, "quiet"),
            table(["mistakes", "gold", "predicted"], rows, is_searchable=True),
        ),
    )


def _spans(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """The entities of BIO tags as first word, word after the last, and kind; each word itself if tags are plain.

    Example:
        >>> _spans(["O", "B-PER", "I-PER"]), _spans(["NOUN"])
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


def _answering(records: Sequence[Record]) -> Html:
    groups = [
        ("wrong", sorted((r for r in records if r["f1"] < 1), key=lambda r: r["f1"])),
        ("uncertain", sorted(records, key=lambda r: abs(r["score"] - r["no_answer_score"]))),
    ]
    rows = [
        (
            name,
            round(100 * r["f1"], 1),
            _text(r["question"]),
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
        *_by_length(records, [record["f1"] for record in records], "lost F1"),
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


def _text(text: str) -> Html:
    return Html(f'<span dir="auto">{escape(text)}</span>')


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
