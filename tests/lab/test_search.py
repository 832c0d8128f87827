"""Learning rates: short runs of equal cost, Optuna, and transfer from a narrow model by muP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bertblocks import load
from bertblocks.core.settings import RecipeError
from bertblocks.lab.plan import make_plan
from bertblocks.lab.results import TRIALS
from bertblocks.lab.search import choose_rate, next_rates
from bertblocks.lab.study import Search, read_study
from tests.lab.conftest import tiny_values
from tests.lab.helpers import Write, plan_of, run

MUP = {"model.config.parametrization": "mup", "model.config.mup_base_hidden_size": 16}


def test_learning_rates_are_searched_at_equal_cost(write_study: Write, tmp_path: Path) -> None:
    path = write_study(search={"runs": 4, "share": 0.5, "factor": 64.0}, seeds=1)
    _, results, names = run(path, tmp_path / "study")
    assert sorted(names) == sorted(["texts", *4 * ["rope-search"], *4 * ["none-search"], "rope-seed0", "none-seed0"])
    for search in results.searches:
        rates = [rate for rate, _ in search.points]
        assert rates == pytest.approx([2e-3 / 8, 2e-3 / 2, 2e-3 * 2, 2e-3 * 8], rel=1e-4)
        assert rates[0] <= search.chosen <= rates[-1]
    chosen = {search.variant: search.chosen for search in results.searches}
    assert {trial.variant: trial.learning_rate for trial in results.trials} == chosen
    assert run(path, tmp_path / "study")[2] == []


def test_optuna_asks_for_the_same_rates_again() -> None:
    """So a search that was interrupted continues with the trials that are there."""
    pytest.importorskip("optuna")
    search = Search(method="optuna", runs=6, factor=256.0)
    points: list[tuple[float, float]] = []
    while rates := next_rates(search, 1e-3, points):
        points.append((rates[0], (math.log10(rates[0]) + 3) ** 2))
    assert len(points) == 6
    assert all(1e-3 / 16 <= rate <= 1e-3 * 16 for rate, _ in points)
    assert [next_rates(search, 1e-3, points[:count]) for count in range(6)] == [[rate] for rate, _ in points]
    assert choose_rate(search, "a", None, points).chosen == min(points, key=lambda point: point[1])[0]


def test_a_search_with_optuna_uses_the_best_rate_that_ran(write_study: Write, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    search = {"method": "optuna", "runs": 3, "share": 0.5, "factor": 1e4}
    path = write_study(search=search, seeds=1, variants={"rope": {}})
    _, results, names = run(path, tmp_path / "study")
    assert names == ["texts", *3 * ["rope-search"], "rope-seed0"]
    (found,), (trial,) = results.searches, results.trials
    losses = dict(found.points)
    assert len(losses) == 3
    assert all(2e-3 / 100 <= rate <= 2e-3 * 100 for rate in losses)
    assert losses[found.chosen] == min(losses.values())
    assert trial.learning_rate == found.chosen
    for count, (rate, _) in enumerate(found.points):
        assert next_rates(Search(**search), 2e-3, found.points[:count]) == [rate]
    assert run(path, tmp_path / "study")[2] == []


def test_rates_transfer_from_a_narrow_model_by_mup(write_study: Write, tmp_path: Path) -> None:
    changes = {**tiny_values(tmp_path)["changes"], **MUP}
    variants = {"mlp": {"model.config.mlp_type": "mlp"}}
    path = write_study(changes=changes, variants=variants, seeds=1, search={"runs": 3, "share": 0.5, "width": 16})
    _, results, _ = run(path, tmp_path / "study")
    places = list((tmp_path / "study" / TRIALS).iterdir())
    configs = {place.name.split("-")[1]: load(place / "run" / "model")[0].config for place in places}
    assert len(places) == 4
    narrow, wide = configs["search"], configs["seed0"]
    assert (narrow.hidden_size, narrow.num_attention_heads, narrow.intermediate_size) == (16, 1, 24)
    assert (wide.hidden_size, wide.num_attention_heads, wide.intermediate_size) == (32, 2, 48)
    for config in (narrow, wide):
        assert (config.parametrization, config.mup_base_hidden_size) == ("mup", 16)
        assert (config.mlp_type, config.num_hidden_layers, config.head_dim) == ("mlp", 2, 16)
    (found,), (trial,) = results.searches, results.trials
    assert trial.learning_rate == found.chosen
    assert results.settings["search"]["width"] == 16
    assert run(path, tmp_path / "study")[2] == []


@pytest.mark.parametrize(
    ("changes", "width", "message"),
    [
        ({}, 16, r"variants.rope: search.width is 16; .*parametrization to mup and .*mup_base_hidden_size to 16"),
        (MUP, 32, r"variants.rope: search.width is 32; it must be less than hidden_size, which is 32"),
        (MUP, 24, r"variants.rope: width 24 would make num_attention_heads 1.5"),
        (MUP, 0, r"search.width is 0"),
    ],
)
def test_bad_widths_are_rejected(
    write_study: Write, tmp_path: Path, changes: dict[str, Any], width: int, message: str
) -> None:
    path = write_study(changes={**tiny_values(tmp_path)["changes"], **changes}, search={"width": width})
    with pytest.raises(RecipeError, match=message):
        make_plan(read_study(path))


def test_narrow_short_runs_cost_less(write_study: Write, tmp_path: Path) -> None:
    """The forecast counts them at their own width."""
    changes = {**tiny_values(tmp_path)["changes"], **MUP}
    narrow, wide = (
        plan_of(write_study(name, changes=changes, search={"width": width}))
        for name, width in (("narrow.yaml", 16), ("wide.yaml", None))
    )
    for first, second in zip(narrow.arms, wide.arms, strict=True):
        costs = [plan.search_trial(arm, {"optimizer.lr": 1e-3}) for plan, arm in ((narrow, first), (wide, second))]
        assert costs[0].flops < 0.6 * costs[1].flops
        assert costs[0].steps == costs[1].steps
        assert first.cost == second.cost
