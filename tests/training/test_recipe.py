"""Recipes: strict reading, errors that name the key, and overrides."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bertblocks.cli.main import app
from bertblocks.core.settings import RecipeError, read_section
from bertblocks.training.amounts import Amount
from bertblocks.training.recipe import Recipe, read_recipe, recipe_names


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=3", "optimizer has no key 'lrr' (did you mean 'lr'?)"),
        ("optimizer.kind=adamm", "optimizer.kind is 'adamm' (did you mean 'adamw'?); it must be one of adamw,"),
        ("optimizer.momentum=0.9", "optimizer has no key 'momentum'"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; it must be a valid number"),
        ("optimizer.lr=0", "optimizer.lr is 0; it must be greater than 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas is [0.9];"),
        ("phases.0.duration=10%", "phases.0.duration is '10%'; it must be more than 0, in steps or tokens"),
        ("phases.0.length=4", "phases.0.length is 4; it must be greater than or equal to 8"),
        ("phases.3.length=64", "'3' is not an index of this list; its indices are 0 to 0"),
        ("phases.0.mixture={docs: 1}", "phases.0.mixture names 'docs', which is not a source"),
        ("schedule.warmup=soon", "schedule.warmup is 'soon'; it must be an amount such as"),
        ("schedule.warmup=200%", "a percentage must be at most 100%"),
        ("schedule.warmup=1.5", "schedule.warmup is 1.5; the number of steps must be an integer"),
        ("objective.rate=1.5", "objective.rate is 1.5; it must be less than 1"),
        ("objective.rate={start: 0.3}", "objective.rate.end is missing"),
        ("objective={mask_share: 0.8, random_share: 0.3}", "their sum must be at most 1"),
        ("objective.z_loss=-1", "objective.z_loss is -1; it must be greater than or equal to 0"),
        ("objective={sentence_order: true, isotropy: 0.1}", "sentence_order, which cannot be combined with bag_of"),
        ("objective={kind: retromae, decoder_rate: 1.0}", "objective.decoder_rate is 1.0; it must be less than 1"),
        (
            "phases.0.objective={kind: retromae}",
            "adds a decoder to the model, but objective masked_lm adds nothing",
        ),
        ("optimizer={kind: muon, qk_clip: 0}", "optimizer.qk_clip is 0; it must be greater than 0"),
        ("corpus.sources.0.files=[a.txt]", "has files and builtin; set exactly one of"),
        ("tokenizer={load: x, vocab_size: 50}", "remove kind and vocab_size"),
        ("model.checkpoint=x", "remove preset, config and grow_from"),
        ("run.sed=1", "run has no key 'sed' (did you mean 'seed'?)"),
        ("modell=1", "has no key 'modell' (did you mean 'model'?)"),
        ("name.x=1", "name is 'demo', which does not have keys"),
        ("run.seed", "'run.seed' is not an override"),
        ("run.seed=[", "is not a valid YAML value"),
    ],
)
def test_invalid_recipes_raise_an_error_that_names_the_key(override: Any, message: Any) -> None:
    with pytest.raises(RecipeError) as error:
        read_recipe(None, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_overrides_apply_to_the_demo_or_the_file(tmp_path: Path) -> None:
    demo = read_recipe(None, ["model.config.num_hidden_layers=9", "optimizer.kind=muon", "optimizer.momentum=0.9"])
    assert demo.model.config["num_hidden_layers"] == 9
    assert demo.model.config["hidden_size"] == Recipe().model.config["hidden_size"]
    assert (demo.optimizer.kind, demo.optimizer.momentum) == ("muon", 0.9)  # type: ignore[attr-defined]
    file = tmp_path / "own.yaml"
    file.write_text("optimizer: {lr: 1e-6}\nphases: [{duration: 1B tokens}, {duration: 5}]\n")
    recipe = read_recipe(file, ["phases.1.length=64"])
    assert (recipe.name, recipe.optimizer.lr) == ("own", 1e-6)
    assert recipe.phases[0].duration == Amount(10**9, "tokens")
    assert recipe.phases[1].length == 64
    assert str(recipe.folder) == "runs/own"


#: Nine levels of nine aliases expand to 387 million values.
BILLION_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "holds a list; it must hold keys and values"),
        ("run: {seed: 1}\nrun: {seed: 2}", "the key 'run' occurs twice"),
        ("run: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("phases: [{length: 64}]", "phases.0.duration is missing"),
        ("? [a, b]\n: 1", "a key must be a single value, not a list or a mapping"),
        ("run: " + "[" * 60 + "]" * 60, "values are nested more than 50 levels deep"),
        ("run: " + "[" * 100_000, "values are nested too deeply"),
        ("run: &a [*a]", "more than 100,000 values once aliases are expanded"),
        ("run: !!timestamp x", "'x' is not a value of the type 'timestamp'"),
        ("run: {seed: 2001-99-99}", "'2001-99-99' is not a value of the type 'timestamp'"),
        ("run: {seed: !!int x}", "'x' is not a value of the type 'int'"),
        (f"run: {{seed: {'1' * 5000}}}", "is not a value of the type 'int'"),
        (BILLION_LAUGHS, "more than 100,000 values once aliases are expanded"),
        (f"run: {{seed: {[0] * 5000}}}", "run.seed is [0, 0, 0"),
    ],
)
def test_files_that_are_not_recipes_raise(tmp_path: Path, text: Any, message: Any) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_recipe(file)
    assert message in str(error.value)
    assert "bad.yaml" in str(error.value)
    assert len(str(error.value).removeprefix(str(file))) < 500


def test_an_unknown_recipe_name_lists_the_shipped_recipes() -> None:
    with pytest.raises(RecipeError, match=r"modernbert is neither a file .*did you mean 'modernbert-base'.*neobert"):
        read_recipe("modernbert")


def test_recipes_survive_json() -> None:
    for name in recipe_names():
        recipe = read_recipe(name)
        assert read_section(Recipe, json.loads(recipe.model_dump_json()), name) == recipe


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        (5, Amount(5, "steps")),
        ("10k steps", Amount(10_000, "steps")),
        ("1.72T tokens", Amount(1.72e12, "tokens")),
        ("2.5%", Amount(2.5, "%")),
        ("1 step", Amount(1, "steps")),
    ],
)
def test_amounts_are_read_and_written(text: Any, amount: Any) -> None:
    assert Amount.read(text) == amount
    assert Amount.read(str(amount)) == amount


def test_the_schema_command_prints_a_schema() -> None:
    result = CliRunner().invoke(app, ["schema"])
    schema = json.loads(result.stdout)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Phase"]["properties"]["length"]["description"].startswith("The length of a packed row")
