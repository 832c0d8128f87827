"""The report of a study: a page with the verdict first, tables as files, and the same numbers as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from bertblocks.lab.report_charts import Effect, forest_chart
from bertblocks.lab.report_scales import (
    compute_charts,
    cost_tiles,
    key_rows,
    label,
    pareto_charts,
    power_laws,
    rate_section,
    scaling_section,
    trend_rows,
)
from bertblocks.lab.report_tables import Row, comparison_rows, name_of, rows_as_csv, trial_rows, write_p, write_tables
from bertblocks.lab.results import StudyResults
from bertblocks.lab.statistics.factorial import main_effects
from bertblocks.lab.statistics.verdicts import ALPHA, BETTER, CHANCE, UNDECIDED, WORSE, Comparison, judge, references
from bertblocks.reports.charts import Chart
from bertblocks.reports.page import (
    REPORT,
    Html,
    badge,
    download,
    figures,
    join,
    paragraph,
    section,
    settings_table,
    table,
    tiles,
    write_page,
)

MAIN_EFFECTS = (
    "A level against the first level of its factor, on average over all levels of the other factors. Intervals and p "
    "values are not corrected for the number of factors."
)
#: Scores of single examples are part of the page's download up to this many.
MOST_SCORES = 1_000_000


def write_study_report(results: StudyResults, folder: Path) -> list[Path]:
    """Writes report.html, and the tables comparisons.md, .tex and .csv and trials.csv, into a folder."""
    comparisons = judge(results)
    rows = comparison_rows(results, comparisons)
    title = headline(results, comparisons)
    page = write_page(folder / REPORT, f"{results.name}: {title}", _page(results, comparisons, rows, title))
    return [page, *write_tables(results, rows, folder)]


def summarize(results: StudyResults) -> dict[str, Any]:
    """The report as plain values, for programs."""
    comparisons = judge(results)
    has_laws = not next(iter(results.measures.values())).higher_is_better
    laws = power_laws(results) if has_laws else {}
    return {
        "study": results.name,
        "headline": headline(results, comparisons),
        "scale": results.scale,
        "level": results.settings.get("level", ALPHA),
        "baseline": results.baseline,
        "deciding_measure": next(iter(results.measures)),
        "missing_trials": len(results.missing),
        "comparisons": comparison_rows(results, comparisons),
        "main_effects": [
            {
                "level": effect.level,
                "against": effect.reference,
                "size": effect.size,
                "difference": effect.difference.value,
                "interval": _finite(effect.difference.interval()),
                "p": effect.difference.p_value(),
            }
            for effect in main_effects(results)
        ],
        "trends_per_tenfold_compute": trend_rows(results, comparisons),
        "power_laws": {
            name: {
                "floor": law.floor,
                "floor_interval": law.floor_interval,
                "exponent": law.exponent,
                "exponent_interval": law.exponent_interval,
            }
            for name, law in laws.items()
        },
    }


def headline(results: StudyResults, comparisons: Sequence[Comparison]) -> str:
    """The verdicts in one sentence."""
    deciding = next(iter(results.measures))
    judged = [found for found in comparisons if found.verdict is not None]
    if not judged:
        return "Undecided: there is nothing to compare with the baseline"
    sizes = {found.size for found in judged}
    groups: dict[str, list[str]] = {BETTER: [], WORSE: [], UNDECIDED: []}
    for variant in dict.fromkeys(found.variant for found in judged):
        verdicts = {found.size: found.verdict or UNDECIDED for found in judged if found.variant == variant}
        if len(set(verdicts.values())) == 1:
            groups[next(iter(verdicts.values()))].append(variant if len(sizes) == 1 else f"{variant} at all sizes")
        else:
            for size, verdict in verdicts.items():
                groups[verdict].append(f"{variant} at {size}")
    if not groups[BETTER] and not groups[WORSE]:
        reason = next((found.reason for found in judged if found.reason == CHANCE), judged[0].reason)
        if reason == CHANCE:
            reason = f"no difference from {compared_with(results)} in {label(deciding)} is beyond chance"
        return f"{'So far undecided' if results.missing else 'Undecided'}: {reason}"
    parts: list[str] = []
    for verdict in (BETTER, WORSE, UNDECIDED):
        if names := groups[verdict]:
            against = f" than {compared_with(results)} in {label(deciding)}" if not parts else ""
            parts.append(f"{_list(names)} {'is' if len(names) == 1 else 'are'} {verdict}{against}")
    return ("So far: " if results.missing else "") + ", ".join(parts)


def compared_with(results: StudyResults) -> str:
    """What the variants are compared with."""
    found = list(dict.fromkeys(references(results).values()))
    return "the step before" if len(found) > 1 else found[0] if found else "the baseline"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _page(results: StudyResults, comparisons: Sequence[Comparison], rows: Sequence[Row], title: str) -> Html:
    deciding = next(iter(results.measures))
    info = results.measures[deciding]
    judged = [row for row in rows if row["verdict"] is not None]
    others = [row for row in rows if row["verdict"] is None]
    direction = "higher" if info.higher_is_better else "lower"
    columns, variants = key_rows(results)
    return join(
        Html(f'<p class="quiet" dir="auto">Study: {escape(results.name)}</p><h1 dir="auto">{escape(title)}</h1>'),
        paragraph(f"Found at {results.scale}. Other scales may have other answers.", "verdict"),
        paragraph(results.description),
        _remarks(results),
        tiles(cost_tiles(results)),
        section(
            f"Verdicts on {label(deciding)} ({info.unit}, {direction} is better)",
            figures([_forest(results, comparisons)] if judged else [], is_wide=True),
            _verdict_table(judged),
            _meaning(results, len(judged)),
            section("All numbers", _number_table(rows), is_folded=True),
        ),
        _main_effects(results),
        section(
            "Quality, compute and speed", figures([*compute_charts(results), *pareto_charts(results)], has_hint=True)
        ),
        section("Variants and the keys that differ", table(columns, variants)),
        section(
            "Other measures",
            _other_table(results, others),
            paragraph("Intervals are not corrected for the number of comparisons." if others else "", "quiet"),
        ),
        scaling_section(results, judged, comparisons),
        rate_section(results),
        section("Data", _downloads(results, rows), _trial_table(results)),
        section("Settings", settings_table(results.settings), is_folded=True),
    )


def _remarks(results: StudyResults) -> Html:
    texts = []
    if results.missing:
        count = len(results.missing)
        texts.append(f"Verdicts wait for {count} planned {'trial' if count == 1 else 'trials'}.")
    texts += [
        f"{variant}, seed {seed}{'' if size is None else f', {size}'}: {why}"
        for variant, seed, size, why in results.failures
    ]
    if stopped := results.settings.get("stopped"):
        texts.append(f"Stopped early, because they could no longer win: {', '.join(stopped)}.")
    return join(*(paragraph(text, "remark") for text in texts))


def _forest(results: StudyResults, comparisons: Sequence[Comparison]) -> Chart:
    info = next(iter(results.measures.values()))
    effects = [
        Effect(
            found.variant if found.size is None else f"{found.variant} at {found.size}",
            found.verdict,
            found.difference.value,
            found.difference.interval(),
            found.difference.interval(found.tested_at or ALPHA),
            found.by_seed,
        )
        for found in comparisons
        if found.verdict is not None
    ]
    counts = {verdict: sum(effect.verdict == verdict for effect in effects) for verdict in (BETTER, WORSE, UNDECIDED)}
    title = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    note = (
        f"Differences from {compared_with(results)}. Thick lines are 95% intervals. Thin lines are those of the tests, "
        "wider if there are several; a verdict needs one that does not reach 0. Ticks are single seeds."
    )
    return forest_chart(
        title, effects, f"difference in {label(info.name)}, {info.unit}", not info.higher_is_better, note
    )


def _verdict_table(rows: Sequence[Row]) -> Html:
    has_reasons = any(row["reason"] not in ("", CHANCE) for row in rows)
    columns = ["variant", "verdict", "found at", "difference", "95% interval", "relative", "Holm's p", "Hedges' g"]
    columns += ["seeds", "detectable", *(["why"] if has_reasons else [])]
    return table(
        columns,
        [
            (
                name_of(row),
                badge(row["verdict"], row["verdict"]),
                row["scale"],
                row["difference"],
                "" if row["low"] is None else f"{row['low']:.3g} to {row['high']:.3g}",
                "" if row["relative"] is None else f"{row['relative']:+.2%}",
                write_p(row["holm_p"]),
                None if row["effect_size"] is None else round(row["effect_size"], 2),
                row["seeds"],
                row["detectable"],
                *([row["reason"].replace(CHANCE, "")] if has_reasons else []),
            )
            for row in rows
        ],
    )


def _main_effects(results: StudyResults) -> Html:
    effects = main_effects(results)
    has_sizes = any(effect.size is not None for effect in effects)
    return section(
        "Main effects of the factors",
        table(
            ["level", "against", *(["size"] if has_sizes else []), "difference", "95% from", "to", "p", "seeds"],
            [
                (
                    effect.level,
                    effect.reference,
                    *([effect.size] if has_sizes else []),
                    effect.difference.value,
                    *_finite(effect.difference.interval()),
                    write_p(effect.difference.p_value()),
                    effect.seeds,
                )
                for effect in effects
            ],
        ),
        paragraph(MAIN_EFFECTS if effects else "", "quiet"),
    )


def _number_table(rows: Sequence[Row]) -> Html:
    hidden = ("size", "reason", "scale")
    columns = (
        [key for key in rows[0] if key not in hidden and any(row[key] is not None for row in rows)] if rows else []
    )
    cells = [[name_of(row), *(row[key] for key in columns[1:])] for row in rows]
    return table(list(map(label, columns)), cells)


def _meaning(results: StudyResults, family: int) -> Html:
    level = results.settings.get("level", ALPHA)
    return section(
        "What a verdict means",
        paragraph(
            "Better and worse are differences beyond chance: of studies in which no variant truly differs, at most "
            f"{level:.0%} give any verdict, over all {family} comparisons together (Holm's correction). Undecided is "
            "not equal: the study does not tell. It finds a difference as large as the detectable one in four of five "
            "cases. Chance covers the seeds and the held-out examples. It does not cover other texts, budgets, "
            "tokenizers or sizes than those of the study, nor learning rates that were not searched."
        ),
        paragraph(
            "Hedges' g is the difference in standard deviations between seeds; it says how reliable a difference is, "
            "not how useful. The Multi-Bootstrap's interval, among all numbers, is there for comparison and does not "
            "decide: with few seeds it is often too narrow. Verdicts hold for seeds that were planned; adding seeds "
            "until a verdict appears finds too many."
        ),
        is_folded=True,
    )


def _other_table(results: StudyResults, rows: Sequence[Row]) -> Html:
    columns = ["variant", "measure", "unit", "better", "against", "variant's", "difference", "95% from", "to", "seeds"]
    return table(
        columns,
        [
            (
                name_of(row),
                label(row["measure"]),
                results.measures[row["measure"]].unit,
                "higher" if results.measures[row["measure"]].higher_is_better else "lower",
                *(row[key] for key in ("against_mean", "variant_mean", "difference", "low", "high", "seeds")),
            )
            for row in rows
        ],
        is_searchable=len(rows) > 8,
        filters=("measure",),
    )


def _downloads(results: StudyResults, rows: Sequence[Row]) -> Html:
    scores = sum(len(found.examples) for found in results.measurements if found.examples is not None)
    values = results.to_json()
    if scores > MOST_SCORES:
        for found in values["measurements"]:
            found["examples"] = found["weights"] = None
    name = results.name
    text = "All trials, measurements and curves" + (
        ", without scores of single examples, which are in the study's folder" if scores > MOST_SCORES else ""
    )
    return join(
        paragraph(f"{text}:"),
        download("trials as CSV", f"{name}-trials.csv", rows_as_csv(trial_rows(results)), "text/csv"),
        download("comparisons as CSV", f"{name}-comparisons.csv", rows_as_csv(rows), "text/csv"),
        download(
            "everything as JSON", f"{name}.json", json.dumps(_finite(values), allow_nan=False), "application/json"
        ),
    )


def _finite(value: Any) -> Any:
    """Plain values in which every number is finite; JSON has no others."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _trial_table(results: StudyResults) -> Html:
    rows = trial_rows(results)
    columns = [key for key in rows[0] if any(row[key] is not None for row in rows)] if rows else []
    cells = [[row[key] for key in columns] for row in rows]
    return section(
        "Trials", table(list(map(label, columns)), cells, is_searchable=True, filters=("variant",)), is_folded=True
    )
