"""The results of a run as tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.measure import fitted_exponent

Result = dict[str, Any]
NONE = "-"
#: Memory growth up to this exponent counts as linear; the rest is noise.
LINEAR = 1.15
#: Studies in which two libraries train in turns.
RACES = ("pretraining", "finetuning", "lora")


@dataclass(frozen=True)
class Sheet:
    """A table of strings with a title. The first columns are text, the others numbers."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    words: int = 1

    def to_rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index >= self.words else "left")
        for line in self.lines:
            table.add_row(*line)
        return table

    def to_markdown(self) -> str:
        """The table without its title.

        Example:
            >>> print(Sheet("Speed", ["", "ms"], [["ours", "3"]]).to_markdown())
            |  | ms |
            | --- | ---: |
            | ours | 3 |
        """
        head = [
            " | ".join(self.columns),
            " | ".join(["---"] * self.words + ["---:"] * (len(self.columns) - self.words)),
        ]
        return "\n".join(f"| {line} |" for line in [*head, *(" | ".join(line) for line in self.lines)])


def write_spread(spread: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
    """A median with its quartiles, if it has any.

    Example:
        >>> write_spread({"median": 2.0, "low": 1.5, "high": 2.25}), write_spread({"median": 2.0})
        ('2.00 (1.50 to 2.25)', '2.00')
    """
    median, *quartiles = (f"{spread[key] * scale:,.{digits}f}" for key in ("median", "low", "high") if key in spread)
    return f"{median} ({' to '.join(quartiles)})" if quartiles else median


def write_bytes(count: float) -> str:
    return f"+{count / 1e6:,.0f} MB"


def by_model(results: dict[str, Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results.values():
        found.setdefault(result["facts"]["model"], []).append(result)
    return found


def last_contender(result: Result) -> Result:
    """The name of BertBlocks if there is only one peer."""
    return list(result["contenders"].values())[-1]


# ---------------------------------------------------------------------- workloads


def workload_sheet(result: Result) -> Sheet:
    """All contenders of one workload, with the reason for each that did not run."""
    columns = ["", "ms", f"times as fast as {result['baseline']}", "useful GFLOP/s", "of sgemm", "agreement", "memory"]
    lines = []
    for name, found in result["contenders"].items():
        if "missing" in found:
            lines.append([name, f"missing: {found['missing']}", NONE, NONE, NONE, agreement(found), NONE])
            continue
        lines.append(
            [
                name,
                write_spread(found["seconds"], 1e3, 0 if found["seconds"]["median"] > 0.1 else 1),
                write_spread(found["speed"]),
                f"{found['gflops']:,.0f}" if "gflops" in found else NONE,
                f"{found['of_sgemm']['median']:.0%}" if "of_sgemm" in found else NONE,
                agreement(found),
                write_bytes(found["memory"]) if "memory" in found else NONE,
            ]
        )
    facts = ", ".join(f"{name} {value:,}" for name, value in result["facts"].items() if not isinstance(value, str))
    title = f"{result['title']} ({facts}; rounds {result['rounds']}; sgemm {result['sgemm_gflops']:,.0f} GFLOP/s)"
    return Sheet(title, columns, lines)


def agreement(found: Result) -> str:
    if "difference" in found:
        return "reference" if found["difference"] == 0 else f"within {found['difference']:.0e}"
    return f"cosine {found['cosine_mean']:.4f}, min {found['cosine_min']:.4f}" if "cosine_mean" in found else NONE


# ---------------------------------------------------------------------- goals


def goals_sheet(run: Result) -> Sheet:
    """Each goal, its baseline, and the result."""
    lines = []
    for key, result in run["rows"].items():
        for goal in result["goals"]:
            reached = goal["reached"]
            names = {"sgemm": "share of the sgemm rate", "memory": f"memory of {goal['against']}, divided by its own"}
            against = names.get(goal["kind"], goal["against"])
            met = NONE if reached is None else "yes" if reached["median"] >= goal["at_least"] else "no"
            value = "not measured" if reached is None else write_spread(reached)
            lines.append([key, goal["contender"], against, f">= {goal['at_least']:g}", value, met])
    lines += shape_goals(run["shapes"]) + memory_goals(run["stacks"]) + accuracy_goals(run["accuracy"])
    for study in RACES:
        for found in run[study]:
            met = "yes" if found["ratio"]["median"] >= found["goal"] else "no"
            goal, reached = f">= {found['goal']:g}", write_spread(found["ratio"])
            against, what = (f"{name}, {found['unit']}" for name in found["rates"])
            lines.append([study, what, against, goal, reached, met])
    if found := run["start"]:
        name, (seconds, _) = list(found["commands"].items())[-1]
        met = "yes" if seconds["median"] <= found["goal"] else "no"
        lines.append(["start", name, "the clock", f"<= {found['goal']:g} s", f"{write_spread(seconds)} s", met])
    return Sheet("Goals", ["workload", "what", "against", "goal", "reached", "met"], lines, words=3)


def shape_goals(shapes: dict[str, Result]) -> list[list[str]]:
    contenders = {key: last_contender(result) for key, result in shapes.items()}
    speeds = {key: found["speed"] for key, found in contenders.items() if "speed" in found}
    if not speeds:
        return []
    slowest = min(speeds, key=lambda key: speeds[key]["median"])
    met = speeds[slowest]["median"] >= 0.95
    what = f"BertBlocks fp32, slowest of {len(speeds)} uniform shapes ({slowest.removeprefix('sweep-')})"
    value = write_spread(speeds[slowest])
    return [["shapes", what, "transformers sdpa", ">= 0.95", value, "yes" if met else "no"]]


def memory_goals(stacks: dict[str, Result]) -> list[list[str]]:
    if len(measured := with_memory(stacks)) < 2:
        return []
    exponent = memory_exponent(measured, list(measured[0]["contenders"])[-1])
    lengths = f"{measured[0]['facts']['tokens']:,} to {measured[-1]['facts']['tokens']:,}"
    met = "yes" if exponent <= LINEAR else "no"
    what, value = f"BertBlocks fp32, memory from {lengths} tokens", f"exponent {exponent:.2f}"
    return [["stacks", what, "length", f"linear (<= {LINEAR})", value, met]]


def accuracy_goals(accuracy: Result) -> list[list[str]]:
    if not accuracy or "missing" in accuracy:
        return []
    (_, exact), *_, (name, found) = accuracy["contenders"].items()
    goal = accuracy["goal"]
    lines = []
    for key, label in (("cosine_mean", "mean token cosine"), ("cosine_min", "least token cosine")):
        met = "yes" if found[key] >= goal[key] else "no"
        lines.append(["accuracy", f"{name}, {label}", "fp32, MiniLM", f">= {goal[key]}", f"{found[key]:.4f}", met])
    if "sts" in found:
        change = found["sts"] - exact["sts"]
        met = "yes" if abs(change) <= goal["sts_change"] else "no"
        what = f"{name}, Spearman on STS-B"
        lines.append(["accuracy", what, "fp32, MiniLM", f"within {goal['sts_change']}", f"{change:+.4f}", met])
    return lines


# ---------------------------------------------------------------------- growth and shapes


def with_memory(stacks: dict[str, Result]) -> list[Result]:
    return [result for result in stacks.values() if "memory" in last_contender(result)]


def memory_exponent(results: list[Result], name: str) -> float:
    lengths = [result["facts"]["tokens"] for result in results]
    return fitted_exponent(lengths, [result["contenders"][name]["memory"] for result in results])


def growth_sheets(stacks: dict[str, Result]) -> list[Sheet]:
    """How milliseconds and memory grow with length, with the exponent of each curve."""
    sheets = [growth_sheet(kind, results) for kind, results in by_model(stacks).items() if len(results) > 1]
    if len(measured := with_memory(stacks)) > 1:
        lines = []
        for name in measured[0]["contenders"]:
            sizes = [write_bytes(result["contenders"][name]["memory"]) for result in measured]
            lines.append([name, *sizes, f"{memory_exponent(measured, name):.2f}"])
        columns = ["", *(f"{result['facts']['tokens']:,}" for result in measured), "exponent"]
        sheets.append(Sheet("Peak memory of the mixed stack by tokens", columns, lines))
    return sheets


def growth_sheet(kind: str, results: list[Result]) -> Sheet:
    lengths = [result["facts"]["tokens"] for result in results]
    names = [
        name for name in results[0]["contenders"] if all("seconds" in result["contenders"][name] for result in results)
    ]
    lines = []
    for name in names:
        seconds = [result["contenders"][name]["seconds"]["median"] for result in results]
        exponents = [f"{fitted_exponent(lengths[-count:], seconds[-count:]):.2f}" for count in (len(lengths), 2)]
        lines.append([name, *(f"{second * 1e3:,.1f}" for second in seconds), *exponents])
    speeds = [result["contenders"][names[-1]]["speed"]["median"] for result in results]
    lines.append([f"{names[-1]}, times as fast", *(f"{speed:.2f}" for speed in speeds), NONE, NONE])
    columns = ["ms", *(f"{length:,}" for length in lengths), "exponent", "of the last doubling"]
    return Sheet(f"{kind} stack, {results[0]['facts']['layers']} layers, by tokens", columns, lines)


def shapes_sheet(shapes: dict[str, Result]) -> Sheet:
    """The speed of uniform batches."""
    lengths = list(dict.fromkeys(result["facts"]["length"] for result in shapes.values()))
    found: dict[str, dict[int, str]] = {}
    for result in shapes.values():
        facts, ours = result["facts"], last_contender(result)
        speed = write_spread(ours["speed"]) if "speed" in ours else f"missing: {ours['missing']}"
        found.setdefault(f"{facts['model']}, {facts['rows']} x", {})[facts["length"]] = speed
    lines = [[name, *(speeds.get(length, NONE) for length in lengths)] for name, speeds in found.items()]
    title = "Uniform batches, BertBlocks fp32, times as fast as transformers sdpa"
    return Sheet(title, ["rows x tokens", *map(str, lengths)], lines)


# ---------------------------------------------------------------------- studies


def accuracy_sheet(accuracy: Result) -> Sheet:
    if "missing" in accuracy:
        return Sheet("int8 accuracy", ["", ""], [["all-MiniLM-L6-v2", f"missing: {accuracy['missing']}"]])
    base = next(iter(accuracy["contenders"].values())).get("sts")
    lines = []
    for name, found in accuracy["contenders"].items():
        if "missing" in found:
            lines.append([name, f"missing: {found['missing']}", NONE, NONE, NONE])
            continue
        sts = [f"{found['sts']:.4f}", f"{found['sts'] - base:+.4f}"] if "sts" in found else ["missing: no data", NONE]
        lines.append([name, f"{found['cosine_mean']:.4f}", f"{found['cosine_min']:.4f}", *sts])
    title = f"int8 accuracy, all-MiniLM-L6-v2, {accuracy['tokens']:,} tokens of {accuracy['texts']}"
    return Sheet(title, ["", "token cosine, mean", "min", "STS-B Spearman", "change"], lines)


def profile_sheets(profiles: dict[str, Result]) -> list[Sheet]:
    sheets = []
    for title, found in profiles.items():
        whole = sum(found["milliseconds"].values())
        lines = []
        for part, milliseconds in found["milliseconds"].items():
            bound = found["at_sgemm_rate"].get(part)
            bounds = [f"{bound:,.1f}", f"{bound / milliseconds:.0%}"] if bound and milliseconds else [NONE, NONE]
            lines.append([part, f"{milliseconds:,.1f}", f"{milliseconds / whole:.0%}", *bounds])
        bound = sum(found["at_sgemm_rate"].values())
        lines.append(["all", f"{whole:,.1f}", "100%", f"{bound:,.1f}", f"{bound / whole:.0%}"])
        columns = ["", "ms", "share", "ms at the sgemm rate", "of that rate"]
        sheets.append(Sheet(f"Profile: {title}", columns, lines))
    return sheets


def race_sheet(found: Result) -> Sheet:
    """Two libraries that train in turns."""
    lines = [
        [name, write_spread(rate, digits=0), found.get("scores", {}).get(name, NONE)]
        for name, rate in found["rates"].items()
    ]
    lines.append([f"{list(found['rates'])[-1]}, times as fast", write_spread(found["ratio"]), NONE])
    return Sheet(found["title"], ["", found["unit"], "score"], lines)


def start_sheet(found: Result) -> Sheet:
    lines = [[name, *map(write_spread, spreads)] for name, spreads in found["commands"].items()]
    return Sheet(found["title"], ["", "seconds", "CPU seconds"], lines)


def study_sheets(run: Result) -> list[Sheet]:
    """All tables over several workloads, in reading order; the goals come last."""
    found = growth_sheets(run["stacks"])
    if run["shapes"]:
        found.append(shapes_sheet(run["shapes"]))
    if run["accuracy"]:
        found.append(accuracy_sheet(run["accuracy"]))
    found += [race_sheet(result) for study in RACES for result in run[study]]
    if run["start"]:
        found.append(start_sheet(run["start"]))
    found += profile_sheets(run["profiles"])
    goals = goals_sheet(run)
    return [*found, goals] if goals.lines else found
