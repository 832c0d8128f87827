"""What the predictions of an evaluation show: quality by label, confusions, calibration, and the worst examples.

`prediction_sections` finds the kind of prediction in the keys of the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bertblocks.reports.charts import bar_chart, matrix_chart, scatter_chart
from bertblocks.reports.page import Html, figures, join, paragraph, section, table
from bertblocks.reports.prediction_parts import SHOWN, Record, by_label, by_length, calibration, cut_text, show_text
from bertblocks.reports.spans import answering_sections, tagging_sections

#: Points in a chart of scored pairs.
MAX_DOTS = 2000


def prediction_sections(records: Sequence[Record]) -> Html:
    """Charts and tables of the predictions, in reading order."""
    if not records:
        return Html("")
    first = records[0]
    if "dataset" in first:
        return join(*(section(name, prediction_sections(own)) for name, own in _by_dataset(records).items()))
    if "words" in first:
        return tagging_sections(records)
    if "context" in first:
        return answering_sections(records)
    if "cosine" in first:
        return _similarity(records)
    if "rank" in first:
        return _retrieval(records)
    if "probabilities" in first:
        return _multi_label(records)
    if "probability" in first:
        return _classes(records)
    return _regression(records)


def _by_dataset(records: Sequence[Record]) -> dict[str, list[Record]]:
    sets: dict[str, list[Record]] = {}
    for record in records:
        sets.setdefault(record["dataset"], []).append({key: record[key] for key in record if key != "dataset"})
    return sets


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
        (
            name,
            show_text(r["text"]),
            r["gold"],
            r["predicted"],
            round(r["probability"], 3),
            round(r["gold_probability"], 3),
        )
        for name, chosen in groups
        for r in chosen[: SHOWN if name != "most certain" else SHOWN // 4]
    ]
    columns = ["why", "text", "gold", "predicted", "probability", "of the gold label"]
    is_right = [float(r["gold"] == r["predicted"]) for r in records]
    return join(
        section("Quality by label", *by_label(real, found)),
        section(
            "Confusion matrix",
            figures([matrix], is_wide=True),
            section("Most common confusions", table(["gold", "predicted", "count"], pairs, True), is_folded=True),
        ),
        section("Calibration and length", figures([*calibration(records, is_right), *by_length(records, is_right)])),
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
        (name, show_text(r["text"]), ", ".join(r["gold"]), ", ".join(r["predicted"]), round(doubt(r), 3))
        for name, chosen in (("wrong", wrong), ("uncertain", sorted(records, key=doubt)))
        for r in chosen[:SHOWN]
    ]
    is_right = [float(a == b) for a, b in zip(real, found, strict=True)]
    columns = ["why", "text", "gold", "predicted", "distance from the threshold"]
    return join(
        section("Quality by label", *by_label(real, found)),
        section("Length", figures(by_length(records, is_right))),
        section("Examples", table(columns, rows, is_searchable=True, filters=["why"])),
    )


# ---------------------------------------------------------------------- numbers and pairs


def _regression(records: Sequence[Record]) -> Html:
    worst = sorted(records, key=lambda r: -abs(r["gold"] - r["predicted"]))
    rows = [(show_text(r["text"]), r["gold"], r["predicted"], abs(r["gold"] - r["predicted"])) for r in worst[:SHOWN]]
    points = [{"gold": r["gold"], "predicted": r["predicted"], "text": cut_text(r["text"])} for r in records[:MAX_DOTS]]
    far = max((abs(r["gold"] - r["predicted"]) for r in records), default=1.0) or 1.0
    closeness = [1 - abs(r["gold"] - r["predicted"]) / far for r in records]
    charts = [
        scatter_chart("Predicted against gold", points, "gold", "predicted"),
        *by_length(records, closeness, f"error, relative to the largest ({far:.3g})"),
    ]
    return join(
        section("Numbers", figures(charts)),
        section("Worst examples", table(["text", "gold", "predicted", "error"], rows, is_searchable=True)),
    )


def _similarity(records: Sequence[Record]) -> Html:
    points = [
        {"gold": r["gold"], "cosine": r["cosine"], "first": cut_text(r["texts"][0]), "second": cut_text(r["texts"][1])}
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
        (
            name,
            *map(show_text, records[i]["texts"]),
            records[i]["gold"],
            round(records[i]["cosine"], 4),
            round(gap[i], 3),
        )
        for name, chosen in groups
        for i in chosen
    ]
    columns = ["why", "first text", "second text", "gold", "cosine", "rank by gold - by cosine"]
    closeness = [1 - abs(difference) for difference in gap]
    charts = [
        scatter_chart("Cosine against the gold score", points, "gold", "cosine"),
        *by_length(records, closeness, "difference of ranks"),
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
    measure = "score" if "gold_score" in records[0] else "cosine"
    right, first = f"gold_{measure}", f"nearest_{measure}"
    points = [{"nearest": r[first], "right text": r[right], "query": cut_text(r["query"])} for r in records[:MAX_DOTS]]
    title = f"{measure.capitalize()} of the right text against that of the nearest"
    measures = scatter_chart(title, points, "nearest", "right text")
    gap = [r[first] - r[right] for r in records]
    order = sorted(range(len(records)), key=lambda i: (-records[i]["rank"], -gap[i]))
    nearest = sorted(range(len(records)), key=lambda i: -records[i][right])[: SHOWN // 2]
    farthest = sorted(range(len(records)), key=lambda i: records[i][right])[: SHOWN // 2]
    rows = [
        (name, *texts, r["rank"], round(r[right], 4), round(r[first], 4))
        for name, chosen in (("worst rank", order[:SHOWN]), ("nearest", nearest), ("farthest", farthest))
        for r in (records[i] for i in chosen)
        if (texts := [show_text(r[key]) for key in ("query", "gold", "nearest")])
    ]
    columns = ["why", "query", "right text", "nearest text", "rank", f"{measure} of the right text", "of the nearest"]
    is_right = [float(record["rank"] == 1) for record in records]
    return join(
        section("Retrieval", figures([ranks, measures, *by_length(records, is_right)])),
        section("Examples", table(columns, rows, is_searchable=True, filters=["why"])),
    )


def _rank_group(rank: int) -> int:
    return rank - 1 if rank <= 3 else 3 if rank <= 10 else 4 if rank <= 100 else 5
