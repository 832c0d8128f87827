"""Objectives, optimizers, schedules and maskings that users register, in recipes and runs."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bertblocks import register_masking, register_objective, register_optimizer, register_schedule
from bertblocks.cli.main import app
from bertblocks.core import plugins
from bertblocks.core.messages import InputError
from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.settings import RecipeError
from bertblocks.objectives import MaskedLanguageModeling
from bertblocks.objectives.maskings import MASKINGS
from bertblocks.training.objective_sections import OBJECTIVES, ObjectiveSection
from bertblocks.training.optimizer_sections import OPTIMIZERS, OptimizerSection
from bertblocks.training.optimizer_state import OPTIMIZER, OPTIMIZER_VALUES, OptimizerState, restore_optimizers
from bertblocks.training.optimizers import decay_groups, trainable
from bertblocks.training.recipe import Recipe, read_recipe
from bertblocks.training.schedules import SCHEDULES, ScheduleSection
from bertblocks.training.training_plan import TrainingPlan
from tests.training.helpers import make_trainer
from tests.training.test_resume import assert_same_run, last_checkpoint


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (MASKINGS, OBJECTIVES, OPTIMIZERS, SCHEDULES):
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))
    plugins.load_plugins.cache_clear()


def register_sgd() -> None:
    @register_optimizer("sgd")
    class SGD(OptimizerSection):
        """Plain gradient descent."""

        momentum: float = 0.0
        """Of the gradient."""

        def build(self, model: Any) -> Any:
            groups = decay_groups(trainable(model), self.weight_decay)
            return [torch.optim.SGD(groups, self.lr, self.momentum)]


def test_an_own_optimizer_trains_as_its_formula_says(tmp_path: Path) -> None:
    """One step of gradient descent without decay moves every weight by -lr * gradient, so by at most lr * clip."""
    register_sgd()
    settings = ["optimizer={kind: sgd, lr: 0.5, weight_decay: 0.0, clip: 0.01}", "schedule={kind: constant}"]
    trainer = make_trainer(tmp_path, *settings, "phases.0.duration=1")
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    moved = torch.cat([(a - b).flatten() for a, b in zip(trainer.model.parameters(), before, strict=True)])
    # the gradient is longer than 0.01 at the start and so clipped to this norm
    assert moved.norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_own_sections_are_strict_and_in_the_schema() -> None:
    register_sgd()
    with pytest.raises(RecipeError, match=r"optimizer has no key 'momentun' \(did you mean 'momentum'\?\)"):
        read_recipe(None, ["optimizer={kind: sgd, momentun: 1}"])
    with pytest.raises(RecipeError, match=r"optimizer.momentum is 'much'; it must be a valid number"):
        read_recipe(None, ["optimizer={kind: sgd, momentum: much}"])
    with pytest.raises(RecipeError, match=r"optimizer.kind is 'sgdd' \(did you mean 'sgd'\?\).* one of adamw,.* sgd"):
        read_recipe(None, ["optimizer={kind: sgdd}"])
    recipe = read_recipe(None, ["optimizer={kind: sgd, lr: 2.0}"])
    assert recipe.record()["optimizer"] == {
        "kind": "sgd", "lr": 2.0, "weight_decay": 0.01, "clip": 1.0, "momentum": 0.0,
    }  # fmt: skip
    choices = Recipe.model_json_schema()["properties"]["optimizer"]["oneOf"]
    assert choices[-1]["properties"]["momentum"]["description"] == "Of the gradient."
    assert choices[-1]["properties"]["kind"]["const"] == "sgd"
    with pytest.raises(ValueError, match=r"the name 'adamw' is taken"):
        register_optimizer("adamw")(OptimizerSection)


def test_an_own_schedule_gives_the_learning_rate_of_every_step() -> None:
    @register_schedule("halving")
    class Halving(ScheduleSection):
        every: int

        def factor(self, position: float, total: float, measure: Any) -> float:
            return 0.5 ** (position // self.every)

    recipe = read_recipe(
        None, ["schedule={kind: halving, every: 3, warmup: 2}", "phases.0.duration=8", "optimizer.lr=4"]
    )
    plan = TrainingPlan(recipe)
    assert [plan.at(step).learning_rate for step in range(8)] == [2, 4, 4, 2, 2, 2, 1, 1]
    with pytest.raises(RecipeError, match=r"schedule.every is missing"):
        read_recipe(None, ["schedule={kind: halving}"])


def test_an_own_objective_is_built_for_each_phase() -> None:
    @register_objective("all_tokens")
    class AllTokens(ObjectiveSection):
        rate: float = 1.0

        def build(self, vocabulary: Any, config: Any) -> Any:
            return MaskedLanguageModeling(vocabulary, self.rate, mask_share=0.0, random_share=0.0)

    phases = "phases=[{duration: 2}, {duration: 2, objective: {kind: all_tokens}, mask_rate: 0.5}, {duration: 2}]"
    objectives = [phase.objective for phase in TrainingPlan(read_recipe(None, [phases])).phases]
    assert [objective.kind for objective in objectives] == ["masked_lm", "all_tokens", "all_tokens"]
    assert [objective.rate for objective in objectives] == [0.3, 0.5, 0.5]  # type: ignore[attr-defined]


def test_all_phases_train_the_same_model() -> None:
    phases = "phases=[{duration: 2}, {duration: 2, objective: {kind: masked_diffusion}}]"
    with pytest.raises(
        RecipeError, match=r"phases.1.objective is masked_diffusion, which trains a masked-diffusion model"
    ):
        read_recipe(None, [phases])


@pytest.mark.parametrize(
    ("former", "masking"),
    [("{}", "token"), ("{spans: true}", "span"), ("{whole_word: true, spans: false}", "word"),
     ("{whole_word: true, spans: true}", "word_span")],
)  # fmt: skip
def test_the_masking_keys_of_earlier_recipes_are_read(former: str, masking: str) -> None:
    assert read_recipe(None, [f"objective={former}"]).objective.masking == masking  # type: ignore[attr-defined]


def test_an_unknown_masking_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"objective.masking is 'spam' \(did you mean 'span'\?\); .*word_span"):
        read_recipe(None, ["objective.masking=spam"])
    with pytest.raises(RecipeError, match=r"objective has masking_options.n, but of masking 'span' it has no options"):
        read_recipe(None, ["objective={masking: span, masking_options: {n: 1}}"])


def install(folder: Path, name: str, code: str) -> None:
    """What pip writes for a package with one module and one entry point."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[bertblocks]\n{name} = {name}\n")


def test_an_installed_package_registers_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from bertblocks import register_masking\nregister_masking('mine')(lambda tokens, rate, vocabulary: ...)"
    install(tmp_path, "my_maskings", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_recipe(None, ["objective.masking=mine"]).objective.masking == "mine"  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "my_maskings")


def test_a_package_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken_maskings", "import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"'broken_maskings' of broken_maskings failed .*no_such_module.*uninstall"):
        read_recipe()
    done = CliRunner().invoke(app, ["plan", "demo"])
    assert done.exit_code == 1
    assert "broken_maskings" in done.output


def test_a_recipe_cannot_name_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("hostile", "hostile.mask", "hostile:mask"):
        with pytest.raises(RecipeError, match=f"objective.masking is '{name}'; it must be one of token"):
            read_recipe(None, [f"objective.masking='{name}'"])


def test_registered_maskings_are_functions_of_this_process() -> None:
    with pytest.raises(ValueError, match=r"the name 'token' is taken"):
        register_masking("token")(lambda tokens, rate, vocabulary: tokens.ids > 0)


# ---------------------------------------------------------------------- optimizers of other libraries


class Wandering(torch.optim.Optimizer):
    """Keeps what optimizers of other libraries keep: a number per group, and nested, shared and plain values."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self.table = torch.linspace(0.5, 1.0, 4)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {"sums": [torch.zeros_like(weight), {"table": self.table}], "last": None, "turn": 0}
                total, shared = state["sums"]
                state["turn"] += 1
                factor = shared["table"][(state["turn"] + group["count"]) % 4]
                total.add_(weight.grad)
                weight.sub_(total, alpha=group["lr"] * float(factor))


def test_a_run_resumes_with_any_state_of_an_optimizer(tmp_path: Path) -> None:
    @register_optimizer("wandering")
    class WanderingSection(OptimizerSection):
        def build(self, model: Any) -> Any:
            return [Wandering(decay_groups(trainable(model), 0.0), self.lr)]

    assert_resumes(tmp_path, "optimizer={kind: wandering, lr: 0.01}")
    values = json.loads((last_checkpoint(tmp_path / "straight") / "optimizer.json").read_text())
    assert [group["count"] for group in values["groups"][0]] == [8, 8]
    assert values["parameters"]["decoder.bias"]["turn"] == 8
    tensors = load_file(last_checkpoint(tmp_path / "straight") / "optimizer.safetensors")
    assert sum("table" in name for name in tensors) == 1, "a shared tensor is written once"


def test_states_of_former_checkpoints_are_read(tmp_path: Path) -> None:
    """They have no file of values; every state is a tensor under KEY/PARAMETER."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    OptimizerState(model, [optimizer]).write(tmp_path)
    assert "exp_avg/weight" in load_file(tmp_path / OPTIMIZER)
    (tmp_path / OPTIMIZER_VALUES).unlink()
    fresh = torch.optim.AdamW(model.parameters())
    restore_optimizers(tmp_path, model, [fresh])
    for parameter in model.parameters():
        assert set(fresh.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][key], value)


@pytest.mark.parametrize(("kind", "package"), [("soap", "pytorch_optimizer"), ("adamw_8bit", "bitsandbytes")])
def test_optimizers_of_the_example_train_and_resume(tmp_path: Path, kind: str, package: str) -> None:
    pytest.importorskip(package)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "optimizers.py"))
    assert_resumes(tmp_path, f"optimizer={{kind: {kind}, lr: 1e-3}}")


def assert_resumes(folder: Path, *settings: str) -> None:
    """Checks that a run that stops after three of eight steps ends as one that does not stop, and that it learns."""
    settings = (*settings, "phases.0.duration=8", "run.checkpoints.every=3", "run.evaluation.every=null")
    make_trainer(folder / "straight", *settings).train()
    losses = [line["loss"] for line in read_metrics(folder / "straight/metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0]
    make_trainer(folder / "stopped", *settings).train()
    for step in (6, 8):
        shutil.rmtree(folder / f"stopped/checkpoints/step-{step:08d}")
    make_trainer(folder / "stopped", *settings).train()
    assert_same_run(folder / "straight", folder / "stopped")
