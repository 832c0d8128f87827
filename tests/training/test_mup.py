"""muP in training: learning rates, decay and epsilon by width, equality at the base, and transfer."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification
from bertblocks.core.metrics_file import read_metrics
from bertblocks.core.settings import RecipeError
from bertblocks.training.optimizer_sections import AdamW, Muon, StableAdamW
from bertblocks.training.optimizers import ADAMW_UPDATE_SIZE, build_adamw, rate_scales, trainable
from bertblocks.training.starting_model import layered_optimizer
from tests.helpers import tiny_config
from tests.nn.test_parametrization import EVERYTHING, MUP, ROOT, WHOLE
from tests.training.helpers import make_model, make_trainer
from tests.training.test_resume import assert_same_run, stop_after

OPTIMIZERS = [AdamW(lr=1e-2), StableAdamW(lr=1e-2), Muon(lr=1e-2)]


def build(model_class: Any = BertBlocksForMaskedLM, **options: Any) -> Any:
    torch.manual_seed(0)
    return model_class(tiny_config(**options)).train()


def take_steps(model: Any, section: Any, steps: int, ids: torch.Tensor, labels: torch.Tensor) -> list[float]:
    optimizers, losses = section.build(model), []
    for _ in range(steps):
        loss = model(ids, labels=labels).loss
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = section.lr * group.get("rate_scale", 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("section", OPTIMIZERS, ids=lambda section: section.kind)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["bert", "everything"])
def test_at_the_base_sizes_mup_is_the_standard_parametrization_bit_for_bit(section: Any, options: Any) -> None:
    ids = torch.randint(5, 60, (4, 12))
    base = {"parametrization": "mup", "mup_base_hidden_size": 32, "mup_base_head_dim": options.get("head_dim", 8)}
    models = [build(**options), build(**options, **base)]
    losses = [take_steps(model, section, 4, ids, ids) for model in models]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    for standard, scaled in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(standard, scaled)


@pytest.mark.parametrize("model_class", [BertBlocksForMaskedLM, BertBlocksForSequenceClassification])
def test_matrices_learn_in_inverse_proportion_to_their_inputs(model_class: Any) -> None:
    """Four times as many inputs: a quarter of the learning rate. All others, such as the decoder, keep it."""
    model = build(model_class, **EVERYTHING, **MUP)
    scales = rate_scales(model)
    for name, weight in model.named_parameters():
        is_matrix = ROOT.search(name) or WHOLE.search(name)
        assert scales.get(id(weight), 1.0) == (0.25 if is_matrix else 1.0), name


def test_the_tied_decoder_keeps_its_learning_rate() -> None:
    model = build(**MUP)
    assert id(model.decoder.weight) not in rate_scales(model)


def groups_by_name(model: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    return {name: groups[id(weight)] for name, weight in model.named_parameters()}


def test_adamw_moves_weights_by_their_rate_and_decays_all_matrices_alike() -> None:
    """The first step of Adam is the learning rate times the sign of the gradient, and decay lr * weight_decay."""
    model = build(**MUP)
    section = AdamW(lr=0.01, weight_decay=0.5, eps=1e-12)
    (optimizer,) = section.build(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    for group in optimizer.param_groups:
        group["lr"] = section.lr * group.get("rate_scale", 1.0)
    optimizer.step()
    for name, weight in model.named_parameters():
        rate = 0.01 * (0.25 if re.search(r"(qkv|out|up|down|dense)\.weight", name) else 1.0)
        kept = 1 - (0.01 * 0.5 if weight.dim() > 1 else 0.0)
        torch.testing.assert_close(weight, before[name] * kept - rate * weight.grad.sign(), rtol=1e-4, atol=1e-6)


def test_epsilon_follows_the_size_of_gradients() -> None:
    model = build(**MUP)
    for section in OPTIMIZERS:
        assert section.build(model)[-1].param_groups[0]["eps"] == section.eps / 4
    assert build_adamw(model, trainable(model), 1e-3).param_groups[0]["eps"] == 1e-8 / 4


def test_stable_adamw_decays_all_matrices_alike() -> None:
    model = build(**MUP)
    optimizer = StableAdamW(lr=0.01, weight_decay=0.1).build(model)[0]
    groups = groups_by_name(model, optimizer)
    for name, weight in model.named_parameters():
        strength = groups[name].get("rate_scale", 1.0) * groups[name]["weight_decay"]
        assert strength == pytest.approx(0.1 if weight.dim() > 1 else 0.0)


def test_muon_moves_matrices_by_the_spectral_norm_that_their_shape_asks_for() -> None:
    """Its updates have the norm lr * 0.2 * sqrt(width), so the rate falls with the root of the width (2310.17813)."""
    model = build(**MUP)
    muon, adamw = Muon(lr=0.01, weight_decay=0.0).build(model)
    (group,) = muon.param_groups
    assert group["rate_scale"] == 0.5
    group["lr"] = 0.01 * group["rate_scale"]
    weight = model.model.encoder.layers[0].attention.out.weight
    before = weight.detach().clone()
    weight.grad = torch.linalg.qr(torch.randn(32, 32)).Q  # all singular values are 1
    muon.step()
    norm = torch.linalg.matrix_norm(weight.detach() - before, 2).item()
    assert norm == pytest.approx(0.5 * 0.01 * ADAMW_UPDATE_SIZE * 32**0.5, rel=0.35)  # Newton-Schulz is approximate
    assert {group.get("rate_scale", 1.0) for group in adamw.param_groups} == {0.25, 1.0}  # the head's matrix


def test_layer_decay_of_fine_tuning_multiplies_the_scales() -> None:
    model = build(BertBlocksForSequenceClassification, **MUP)
    optimizer = layered_optimizer(model, 1e-3, 0.01, layer_decay=0.5)
    groups = groups_by_name(model, optimizer)
    assert groups["model.encoder.layers.1.mlp.up.weight"]["rate_scale"] == 0.5**2 * 0.25
    assert groups["model.encoder.layers.1.mlp.up.bias"]["rate_scale"] == 0.5**2
    assert groups["classifier.weight"]["rate_scale"] == 0.25


def test_optimizers_without_rules_are_rejected() -> None:
    class Plain(AdamW):
        kind: str = "plain"

        def build(self, model: Any) -> Any:
            return [torch.optim.SGD(model.parameters(), self.lr)]

    Plain().check_parametrization("standard")
    with pytest.raises(RecipeError, match=r"optimizer.kind is 'plain', which has no learning rates for .* 'mup'"):
        Plain().check_parametrization("mup")
    for section in OPTIMIZERS:
        section.check_parametrization("mup")


def test_resumed_runs_are_exact_and_metrics_log_the_base_rate(tmp_path: Path) -> None:
    settings = ["phases.0.duration=6", "optimizer.lr=3e-3"]

    def trainer(folder: str, **options: Any) -> Any:
        return make_trainer(tmp_path / folder, *settings, model=make_model(0.1, **options))

    scaled = {"parametrization": "mup", "mup_base_hidden_size": 8}
    trainer("straight", **scaled).train()
    stopped = trainer("stopped", **scaled)
    stop_after(stopped, 2)
    stopped.train()
    trainer("stopped", **scaled).train()
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    trainer("standard").train()
    rates, standard = (
        [line.get("learning_rate") for line in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("straight", "standard")
    )
    assert rates == standard


# ---------------------------------------------------------------------- transfer


def make_progressions(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that count up by 1, 2 or 3 modulo 32, with 30 % of their tokens masked."""
    start, step = (torch.randint(low, high, (16, 1), generator=generator) for low, high in ((0, 32), (1, 4)))
    ids = (start + step * torch.arange(16)) % 32 + 4
    is_masked = torch.rand(ids.shape, generator=generator) < 0.3
    return ids.masked_fill(is_masked, 3), ids.masked_fill(~is_masked, -100)


def train_progressions(width: int, lr: float, **options: Any) -> float:
    """The mean loss of the last 20 of 150 steps."""
    sizes = {"hidden_size": width, "num_attention_heads": width // 16, "intermediate_size": 2 * width}
    shape = {"vocab_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 16, "type_vocab_size": 0}
    start = {"norm_pos": "pre", "init_kind": "normal", "initializer_range": 0.1}
    model = build(**sizes, **shape, **start, **options)
    section, generator, losses = AdamW(lr=lr, weight_decay=0.0), torch.Generator().manual_seed(0), []
    (optimizer,) = section.build(model)
    for step in range(150):
        ids, labels = make_progressions(generator)
        loss = model(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 10) * (1 - step / 150) * group.get("rate_scale", 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@pytest.mark.slow
def test_the_best_learning_rate_moves_less_with_width_than_in_the_standard_parametrization() -> None:
    exponents = [-10, -9, -8, -7, -6]

    def best(width: int, **options: Any) -> int:
        losses = {power: train_progressions(width, 2.0**power, **options) for power in exponents}
        return min(losses, key=lambda power: losses[power])

    base = {"parametrization": "mup", "mup_base_hidden_size": 32, "mup_base_head_dim": 16}
    start = best(32)  # both are the same at the base width
    assert start - best(256) >= 2
    assert abs(start - best(256, **base)) <= 1
