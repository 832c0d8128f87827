"""The coordinate check: its fit, its widths, its verdict on both parametrizations, its page and its command."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bertblocks import BertBlocksConfig
from bertblocks.cli.main import app
from bertblocks.lab.coordinate_check import CoordinateCheck, Drift, at_width, check_coordinates, fit_exponent
from bertblocks.lab.coordinate_page import verdict_of
from bertblocks.training.optimizer_sections import AdamW, Muon

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
MUP: dict[str, Any] = {"parametrization": "mup", "mup_base_hidden_size": 32, "mup_base_head_dim": 8}
PRE = {"norm_pos": "pre", "norm_fn": "rms", "norm_bias": False, "mlp_type": "glu", "block_pos_enc_kind": "rope"}
WIDTHS = [32, 64, 128]


def check(optimizer: Any, widths: Any = WIDTHS, grow: str = "heads", **options: Any) -> CoordinateCheck:
    return check_coordinates(BertBlocksConfig(**SHAPE, **options), optimizer, widths, steps=2, grow=grow)


def test_exponents_are_those_of_powers() -> None:
    widths = [64, 128, 256]
    for exponent in (-0.5, 0.0, 1.5):
        assert fit_exponent(widths, [3 * width**exponent for width in widths]) == pytest.approx(exponent)
    assert fit_exponent(widths, [1.0, math.nan, 1.0]) == math.inf


@pytest.mark.parametrize("grow", ["heads", "head-dim"])
def test_standard_parametrization_fails(grow: str) -> None:
    """With a large learning rate attention logits grow at least with the width, and so does the rest."""
    found = check(AdamW(lr=1e-2), grow=grow)
    drifts = {drift.name: drift for drift in found.drifts}
    assert not found.passes
    assert drifts["layer 0 attention logits"].change > 1
    assert drifts["layer 0 feed-forward"].size > 0.5
    assert verdict_of(found).startswith(f"{len(found.drifting)} of 6 activations drift with width")


@pytest.mark.parametrize(
    ("optimizer", "grow", "options"),
    [
        (AdamW(lr=1e-2), "heads", {}),
        (AdamW(lr=1e-3), "heads", {**PRE, "num_kv_heads": 2, "qk_norm": True}),
        (AdamW(lr=1e-2), "head-dim", {}),
        (Muon(lr=1e-2), "heads", PRE),
        pytest.param(AdamW(lr=1e-3), "heads", {**PRE, "mlp_type": "moe"}, marks=pytest.mark.slow),
        pytest.param(AdamW(lr=1e-3), "heads", {"block_pos_enc_kind": "disentangled"}, marks=pytest.mark.slow),
        pytest.param(
            AdamW(lr=1e-3), "heads", {"init_kind": "mitchell", "norm_pos": "sandwich"}, marks=pytest.mark.slow
        ),
        pytest.param(AdamW(lr=1e-3), "heads", {"tie_word_embeddings": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mup_passes(optimizer: Any, grow: str, options: Any) -> None:
    found = check(optimizer, grow=grow, **options, **MUP)
    assert found.passes, verdict_of(found)


def test_mup_without_its_learning_rates_fails() -> None:
    """The right initial weights do not suffice: changes then grow with the width."""

    class Plain(AdamW):
        def build(self, model: Any) -> Any:
            optimizers = super().build(model)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group.pop("rate_scale", None)
            return optimizers

    assert "layer 0 feed-forward" in [drift.name for drift in check(Plain(lr=1e-2), **MUP).drifting]


def test_what_counts_as_drift() -> None:
    assert Drift("layer 0 output", 0.3, 0.0).is_beyond(0.25)
    assert Drift("layer 0 output", 0.0, -0.3).is_beyond(0.25)
    assert Drift("layer 0 output", math.inf, math.inf).is_beyond(0.25)
    assert Drift("layer 0 output", 0.0, math.nan).is_beyond(0.25)
    assert not Drift("layer 0 output", -0.5, 0.2).is_beyond(0.25)
    assert not Drift("logits", -0.5, -0.5).is_beyond(0.25)  # by design at the start
    assert Drift("logits", 0.3, 0.0).is_beyond(0.25)


def test_sizes_follow_the_width() -> None:
    config = BertBlocksConfig(
        **{**SHAPE, "num_hidden_layers": 2}, num_kv_heads=2, layer_overrides={1: {"num_kv_heads": 4}}
    )
    wide, deep = at_width(config, 64), at_width(config, 64, "head-dim")
    assert (wide.hidden_size, wide.intermediate_size, wide.embedding_size) == (64, 128, 64)
    assert (wide.num_attention_heads, wide.num_kv_heads, wide.head_dim) == (8, 4, 8)
    assert (deep.num_attention_heads, deep.num_kv_heads, deep.head_dim) == (4, 2, 16)
    assert wide.layer_overrides == {1: {"num_kv_heads": 8}}
    assert wide.attention_dropout == wide.embedding_dropout == 0.0
    with pytest.raises(ValueError, match=r"width 36 would make num_attention_heads 4.5; choose widths"):
        at_width(BertBlocksConfig(**SHAPE), 36)
    with pytest.raises(ValueError, match="widths are 64, 32; they must be at least two, in rising order"):
        check(AdamW(), widths=[64, 32])


# ---------------------------------------------------------------------- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lab", "check-mup", *arguments])


def save_config(folder: Path) -> str:
    BertBlocksConfig(**SHAPE).save_pretrained(folder)
    return str(folder / "config.json")


def test_the_command_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    config, page = save_config(tmp_path), tmp_path / "page.html"
    small = ["--widths", "32,64,128", "--steps", "2", "--lr", "1e-2"]
    settings = [f"{key}={value}" for key, value in MUP.items()]
    done = run(config, *settings, *small, "--output", str(page))
    assert done.exit_code == 0, done.output
    assert "No activation drifts with width" in done.output
    assert "attention logits" in page.read_text()
    done = run(config, *small, "--json")
    assert done.exit_code == 1
    values = json.loads(done.output)
    assert (values["parametrization"], values["optimizer"], values["lr"]) == ("standard", "adamw", 0.01)
    assert not values["passes"]
    assert [len(row) for row in values["activations"][0]["sizes"]] == [3, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paramtrization=mup"], "'paramtrization' is not a key of BertBlocksConfig (did you mean 'parametrization'?)"),
        (["parametrization=mup"], "mup_base_hidden_size is None"),
        (["--widths", "32,x"], "--widths is '32,x'; write whole numbers"),
        (["--optimizer", "adam"], "adam"),
    ],
)
def test_mistakes_end_in_one_sentence(tmp_path: Path, arguments: Any, message: str) -> None:
    done = run(save_config(tmp_path), *arguments)
    assert done.exit_code == 1
    assert message in done.output
    assert done.output.count("\n") == 1
