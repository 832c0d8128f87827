"""The results of `benchmarks.serve` as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.report import NONE, Sheet
from benchmarks.serve_peers import SERVERS

Found = dict[str, Any]
#: Goals: throughput over the best peer, p99 under load over idle, milliseconds of HTTP and scheduling, memory growth.
TIMES_FP32, TIMES_INT8, LANES, OVERHEAD, GROWTH = 2.0, 4.0, 1.5, 0.5, 1.05


def milliseconds(number: float) -> str:
    return f"{number:,.2f}" if number < 10 else f"{number:,.0f}"


def statuses(found: Found) -> str:
    return ", ".join(
        f"{count:,} x {status if status != '0' else 'none'}" for status, count in found["statuses"].items()
    )


def throughput_lines(found: Found, results: dict[str, Found]) -> list[list[str]]:
    at_best = found["at_best"]
    client = [f"{at_best['client_share']:.0%}", milliseconds(at_best["client_lag_p99"])] if at_best else [NONE, NONE]
    latency = [milliseconds(at_best[name]) for name in ("p50", "p99")] if at_best else [NONE, NONE]
    ratio = times_best_peer(found, results)
    return [
        [f"{found['best']:,.0f}", *latency, f"{ratio:.2f}" if ratio else NONE, f"{found['capacity']:,.0f}", *client]
    ]


def times_best_peer(found: Found, results: dict[str, Found]) -> float:
    """The rate over that of the best peer; 0 if no peer was measured with the same bound."""
    peers = [
        other["best"] for key, other in results.items() if not SERVERS[key].is_ours and other["bound"] == found["bound"]
    ]
    return found["best"] / max(peers) if peers and max(peers) else 0.0


def lanes_lines(found: Found, results: dict[str, Found]) -> list[list[str]]:
    idle, loaded = found["idle"], found["loaded"]
    latencies = [milliseconds(run[name]) for run in (idle, loaded) for name in ("p50", "p99")]
    share = f"{loaded['client_share']:.0%}"
    return [[*latencies, f"{found['ratio']:.2f}", f"{found['documents']['rate']:,.1f}", share, statuses(loaded)]]


def overhead_lines(found: Found, results: dict[str, Found]) -> list[list[str]]:
    return [[milliseconds(found[name]) if name in found else NONE for name in ("http", "in_process", "overhead")]]


def overload_lines(found: Found, results: dict[str, Found]) -> list[list[str]]:
    after = f"{statuses(found['after'])}, p50 {milliseconds(found['after']['p50'])} ms"
    numbers = [f"{found['capacity']:,.0f}", f"{found['planned']:,}", statuses(found), milliseconds(found["p99"])]
    return [[*numbers, after, f"{found['client_share']:.0%}"]]


def memory_lines(found: Found, results: dict[str, Found]) -> list[list[str]]:
    sizes = [reading["bytes"] / 1e6 for reading in found["readings"]]
    counts = [f"{found['requests']:,}", f"{found['failed']:,}", f"{found['rate']:,.0f}"]
    return [[*counts, f"{sizes[0]:,.0f}", f"{max(sizes):,.0f}", f"{sizes[-1]:,.0f}", f"{sizes[-1] / sizes[0]:.3f}"]]


def formats_lines(found: Found, results: dict[str, Found]) -> list[list[str]]:
    return [
        [name, f"{run['rate']:,.1f}", milliseconds(run["p50"]), statuses(run)] for name, run in found["formats"].items()
    ]


Lines = Callable[[Found, dict[str, Found]], list[list[str]]]
SHEETS: dict[str, tuple[str, list[str], Lines]] = {
    "throughput": (
        "Mixed requests/s within the bound of p99",
        ["requests/s", "p50 ms", "p99 ms", "times the best peer", "closed loop", "client's CPU", "client's lag p99 ms"],
        throughput_lines,
    ),
    "lanes": (
        "Short queries alone, and while documents keep the server busy",
        ["idle p50 ms", "p99", "busy p50 ms", "p99", "p99 busy / idle", "documents/s", "client's CPU", "answers"],
        lanes_lines,
    ),
    "overhead": (
        "One short query at a time, median",
        ["over HTTP, ms", "in process, ms", "difference, ms"],
        overhead_lines,
    ),
    "overload": (
        "Three times the capacity",
        ["capacity", "requests", "answers", "p99 of 200s, ms", "afterwards", "client's CPU"],
        overload_lines,
    ),
    "memory": (
        "Resident memory over short requests",
        ["requests", "failed", "requests/s", "first MB", "most MB", "last MB", "last / first"],
        memory_lines,
    ),
    "formats": ("Requests/s of 32 short texts by format", ["format", "requests/s", "p50 ms", "answers"], formats_lines),
}


def measure_sheet(measure: str, results: dict[str, Found]) -> Sheet:
    """All servers of one measure, with the commands and machines they were measured by."""
    title, columns, lines = SHEETS[measure]
    rows = [[SERVERS[key].title, *line] for key in SERVERS if key in results for line in lines(results[key], results)]
    sources = dict.fromkeys(
        f"{found['command']} ({found['machine']['processor']}, {found['machine']['threads']} CPUs)"
        for found in results.values()
    )
    return Sheet("\n".join([title, *sources]), ["", *columns], rows)


def goals_sheet(results: dict[str, dict[str, Found]]) -> Sheet:
    """Each goal and what BertBlocks reached."""
    lines = []

    def add(what: str, goal: str, reached: str, is_met: bool) -> None:
        lines.append([what, goal, reached, "yes" if is_met else "no"])

    for key, least in (("ours", TIMES_FP32), ("ours-int8", TIMES_INT8)):
        title, found = SERVERS[key].title, {measure: results.get(measure, {}).get(key) for measure in SHEETS}
        if rates := found["throughput"]:
            ratio = times_best_peer(rates, results["throughput"])
            what = f"{title}, requests/s over the best peer, p99 <= {rates['bound']:g} ms"
            add(what, f">= {least:g}", f"{ratio:.2f}", ratio >= least)
        if queries := found["lanes"]:
            ratio = queries["ratio"]
            add(f"{title}, p99 of short queries, busy over idle", f"<= {LANES:g}", f"{ratio:.2f}", ratio <= LANES)
        if times := found["overhead"]:
            extra = times["overhead"]
            add(f"{title}, HTTP and scheduling", f"<= {OVERHEAD:g} ms", f"{extra:.2f} ms", extra <= OVERHEAD)
        if flood := found["overload"]:
            reached = (
                f"{flood['refused']:,} x 429, {flood['server_errors']:,} x 5xx, {flood['unanswered']:,} unanswered"
            )
            is_met = flood["refused"] > 0 and not flood["server_errors"] and not flood["unanswered"]
            add(f"{title}, overload", "429, no 5xx", reached, is_met)
        if sizes := found["memory"]:
            growth = sizes["readings"][-1]["bytes"] / sizes["readings"][0]["bytes"]
            what = f"{title}, memory after {sizes['requests']:,} requests over {sizes['readings'][0]['requests']:,}"
            add(what, f"<= {GROWTH:g}", f"{growth:.3f}", growth <= GROWTH)
    return Sheet("Goals", ["what", "goal", "reached", "met"], lines)
