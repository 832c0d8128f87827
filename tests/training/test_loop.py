"""The training loop, tested against plain transformers and torch, and its handling of failures."""

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM

import bertblocks
from bertblocks.core.metrics_file import read_metrics
from bertblocks.training.distributed import World
from bertblocks.training.loop import ModelSelection, NonFiniteError
from bertblocks.training.prefetch import split_micro_batches
from bertblocks.training.state import EMA, BestEvaluation
from tests.training.helpers import VOCABULARY, make_model, make_recipe, make_task, make_trainer, train


def pad(batch: Any) -> dict[str, torch.Tensor]:
    """A flat batch in the form that transformers expects."""
    bounds = batch.cu_seqlens.tolist()
    slices = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def padded(values: Any, fill: Any) -> Any:
        return torch.nn.utils.rnn.pad_sequence([values[part] for part in slices], True, fill)

    mask = padded(torch.ones_like(batch.input_ids), 0)
    return {"input_ids": padded(batch.input_ids, 0), "attention_mask": mask, "labels": padded(batch.labels, -100)}


def test_losses_equal_transformers_with_torch_adamw(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.BertForMaskedLM(config)
    ours = bertblocks.from_huggingface(theirs)
    trainer = make_trainer(tmp_path, "phases.0.duration=20", "optimizer.lr=3e-3", model=ours)
    trainer.train()
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]

    named = list(theirs.named_parameters())
    groups = [
        {"params": [parameter for _, parameter in named if parameter.dim() > 1], "weight_decay": 0.01},
        {"params": [parameter for _, parameter in named if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98), eps=1e-6)
    recipe = make_recipe("phases.0.duration=20", "optimizer.lr=3e-3")
    task, position, expected = make_task(recipe), trainer.task.initial_position(), []
    theirs.train()
    for step in range(20):
        rows, position = task.next_items(step, position)
        loss = theirs(**pad(task.collate(step, rows))).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            # WSD by hand: 5 % warm-up is the first step, the last 30 % fall as 1 - sqrt
            group["lr"] = 3e-3 * (1 - math.sqrt(max(step - 14, 0) / 6))
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < expected[0] - 0.1, "nothing was learned"
    assert losses == pytest.approx(expected, abs=1e-4)


def test_checkpoints_open_in_auto_classes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "phases.0.duration=2")
    trainer.train()
    opened = AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoints" / "step-00000002")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["muon", "stable_adamw"])
def test_other_optimizers_reduce_the_loss_and_resume(tmp_path: Path, kind: Any) -> None:
    options = [f"optimizer.kind={kind}", "optimizer.lr=3e-3", "optimizer.weight_decay=0.001", "run.ema=0.9"]
    train(tmp_path / "straight", *options)
    train(tmp_path / "parts", *options)
    (tmp_path / "parts" / "checkpoints" / "step-00000024" / "complete.json").unlink()
    train(tmp_path / "parts", *options)
    for file in ("model.safetensors", EMA):
        first, second = (
            load_file(tmp_path / name / "checkpoints/step-00000024" / file) for name in ("straight", "parts")
        )
        assert all(torch.equal(first[key], second[key]) for key in first)
    losses = [line["loss"] for line in read_metrics(tmp_path / "straight" / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < losses[0] - 0.05


def test_ema_equals_its_formula(tmp_path: Path) -> None:
    """Compares with the formula over the weights of every step."""
    trainer = make_trainer(tmp_path, "phases.0.duration=6", "run.ema=0.5", "run.checkpoints.keep=9",
                           "run.checkpoints.every=1")  # fmt: skip
    expected = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    for step in range(6):
        decay = min(0.5, (1 + step) / (10 + step))
        weights = load_file(tmp_path / "checkpoints" / f"step-{step + 1:08d}" / "model.safetensors")
        expected = {name: decay * parameter + (1 - decay) * weights[name] for name, parameter in expected.items()}
    for name, parameter in load_file(tmp_path / "checkpoints" / "step-00000006" / EMA).items():
        torch.testing.assert_close(parameter, expected[name])
    with trainer.evaluation_weights():
        inside = trainer.model.decoder.bias.clone()
    assert torch.allclose(inside, expected["decoder.bias"])
    assert not torch.equal(inside, trainer.model.decoder.bias)


def test_a_loss_that_is_not_finite_stops_training_before_the_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    real = trainer.task.losses

    def losses(model: Any, batch: Any) -> Any:
        found = real(model, batch)
        return {key: value * math.nan for key, value in found.items()} if trainer.state.step == 5 else found

    trainer.task.losses = losses  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=r"loss of step 6 is nan.*saved in .*not-finite-step-00000006") as error:
        trainer.train()
    file = next(tmp_path.glob("not-finite-*.safetensors"))
    assert str(file) in str(error.value)
    kept = load_file(file)
    rows, _ = trainer.task.next_items(5, trainer.state.position)
    assert torch.equal(kept["0.input_ids"], trainer.task.collate(5, rows).input_ids)
    assert trainer.state.step == 5
    assert trainer.checkpoints.steps() == [4]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_early_stopping_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    values = iter([0.95, 0.1, 0.5, 0.4, 0.3, 0.9])  # the first is that of the start, which selects nothing
    trainer = make_trainer(
        tmp_path, "run.evaluation.every=3", "run.checkpoints.every=3", "run.checkpoints.keep=1",
        selection=ModelSelection("quality", patience=2),
    )  # fmt: skip
    trainer.task.evaluate = lambda model: {"quality": next(values)}  # type: ignore[method-assign]
    outcome = trainer.train()
    assert outcome.state.step == 12
    assert (outcome.state.best.step, outcome.state.best.value) == (6, 0.5)
    assert trainer.checkpoints.steps() == [6, 12]


def test_ties_go_to_the_later_evaluation_but_not_against_the_start(tmp_path: Path) -> None:
    for start, values, best, last in ((0.5, [0.5, 0.4, 0.5, 0.1], 0, 6), (0.1, [0.5, 0.4, 0.5, 0.1], 9, 9)):
        scores = iter([0.95, *values])  # the first is written to the metrics only
        trainer = make_trainer(
            tmp_path / str(start), "run.evaluation.every=3", "run.checkpoints.every=3",
            selection=ModelSelection("quality", patience=2, prefers_later=True),
        )  # fmt: skip
        trainer.task.evaluate = lambda model, scores=scores: {"quality": next(scores)}  # type: ignore[method-assign, misc]
        trainer.state.best = BestEvaluation(0, start)
        outcome = trainer.train()
        assert (outcome.state.best.step, outcome.state.step) == (best, last)


def test_phases_change_theta_length_and_mixture(tmp_path: Path) -> None:
    options = [
        "phases=[{duration: 3, length: 32, batch_tokens: 128}, {duration: 2 steps, length: 16, rope_theta: 5e4}]"
    ]
    trainer = make_trainer(tmp_path, *options, model=make_model(rope_theta=1e4, local_rope_theta=1e4))
    assert trainer.task.total_steps == 5
    trainer.train()
    config = trainer.model.config
    assert (config.rope_theta, config.local_rope_theta) == (5e4, 1e4)
    attentions = [layer.attention for layer in trainer.model.model.encoder.layers]
    thetas = [attention.position.theta for attention in attentions]
    assert thetas == [5e4 if kind == "global" else 1e4 for kind in config.layer_types]
    assert all(
        layer.attention.pattern.position is layer.attention.position for layer in trainer.model.model.encoder.layers
    )
    opened = AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoints" / "step-00000005").eval()
    ids = torch.randint(4, VOCABULARY, (1, 30))
    assert torch.allclose(opened(ids).logits, trainer.model.eval()(ids).logits, atol=1e-6)
    # a finished run that is started again has the theta of its last phase
    again = make_trainer(tmp_path, *options, model=make_model(rope_theta=1e4, local_rope_theta=1e4))
    again.train()
    assert again.model.config.rope_theta == 5e4
    assert torch.equal(again.model.eval()(ids).logits, trainer.model(ids).logits)
    rows, position = trainer.task.next_items(3, {"phase": 0, "pool": 7, "row": 7})
    assert (len(rows), position["phase"]) == (8, 1)
    assert max(len(chunk.ids) for row in rows for chunk in row) <= 14


def test_ngpt_weights_stay_on_the_sphere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = bertblocks.BertBlocksConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        embd_pos_enc_kind="none", block_pos_enc_kind="rope", type_vocab_size=0, ngpt=True, mask_token_id=3,
    )  # fmt: skip
    model = bertblocks.BertBlocksForMaskedLM(config)
    trainer = make_trainer(tmp_path, "phases.0.duration=2", model=model)
    trainer.train()
    layer = trainer.model.model.encoder.layers[0]
    for weight, side in ((layer.attention.qkv.weight, 1), (layer.mlp.down.weight, 0)):
        torch.testing.assert_close(weight.norm(dim=side), torch.ones(weight.shape[1 - side]))


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    for name, flag in (("plain", "false"), ("again", "true")):
        train(tmp_path / name, "phases.0.duration=4", f"run.gradient_checkpointing={flag}")
    plain, again = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("plain", "again")
    )
    assert len(again) == 4
    assert again == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close_to_fp32_and_resumes(tmp_path: Path, precision: Any) -> None:
    options = ["phases.0.duration=8", f"run.precision={precision}"]
    train(tmp_path / "full", "phases.0.duration=8")
    train(tmp_path / "half", *options)
    full, half = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("full", "half"))
    assert [line["loss"] for line in half[1:9]] == pytest.approx([line["loss"] for line in full[1:9]], rel=0.01)
    assert [line["loss"] for line in half[1:9]] != [line["loss"] for line in full[1:9]]
    last = tmp_path / "half" / "checkpoints" / "step-00000008"
    weights = load_file(last / "model.safetensors")
    assert weights["model.embedding.token.weight"].dtype == torch.float32
    (last / "complete.json").unlink()
    train(tmp_path / "half", *options)
    again = load_file(last / "model.safetensors")
    assert all(torch.equal(again[key], value) for key, value in weights.items())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("most", [None, 1, 2, 5, 100])
def test_every_item_is_in_exactly_one_micro_batch(size: Any, most: Any) -> None:
    items = list(range(17))
    parts = [split_micro_batches(items, World(rank, size, torch.device("cpu")), most) for rank in range(size)]
    assert [item for part in parts for batch in part for item in batch] == items
    assert len({len(part) for part in parts}) == 1, "processes would wait for one another for ever"
    assert all(part for batches in parts for part in batches)


def test_fewer_items_than_processes_raise() -> None:
    with pytest.raises(ValueError, match="2 items for 3 processes"):
        split_micro_batches([1, 2], World(0, 3, torch.device("cpu")), None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_give_the_losses_of_plain_ones(tmp_path: Path) -> None:
    curves = []
    for value in ("false", "true"):
        train(tmp_path / value, f"run.compile={value}")
        curves.append([line["loss"] for line in read_metrics(tmp_path / value / "metrics.jsonl") if "loss" in line])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_metrics_show_what_the_routers_of_experts_did(tmp_path: Path) -> None:
    model = make_model(mlp_type="moe", num_experts=4, layer_overrides={1: {"num_experts": 2}})
    seen: list[Any] = []
    encode = model.model.encode

    def record(*args: Any, **options: Any) -> Any:
        encoded = encode(*args, **options)
        seen.append(encoded.routing)
        return encoded

    model.model.encode = record  # type: ignore[method-assign]
    train(tmp_path, "phases.0.duration=1", "run.micro_batch_tokens=128", "run.evaluation.every=2", model=model)
    line = next(line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line)
    batches = [routing for routing in seen if routing]
    assert len(batches) == 2

    def mean(read: Any) -> float:
        values = [float(read(routing)) for routing in batches]
        return sum(values) / len(values)

    expected = {
        "router_load_0": mean(lambda layers: (layers[0].load[0] + layers[1].load[0]) / 2),
        "router_load_3": mean(lambda layers: layers[0].load[3]),  # the second layer has two experts
        "router_entropy": mean(lambda layers: (layers[0].entropy + layers[1].entropy) / 2),
        "router_balance_loss": mean(lambda layers: (layers[0].balance_loss + layers[1].balance_loss) / 2),
        "router_z_loss": mean(lambda layers: (layers[0].z_loss + layers[1].z_loss) / 2),
        "router_dropped": 0.0,
    }
    assert {key: line[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert "router_load_4" not in line


def test_metrics_of_routers_do_not_depend_on_when_checkpoints_are_written(tmp_path: Path) -> None:
    """A checkpoint in the middle of a window holds its sums, and a run that resumes from there continues them."""
    lines = []
    for name, every in (("whole", 100), ("each step", 1)):
        options = [f"run.checkpoints.every={every}", "run.log_every=3", "phases.0.duration=3"]
        train(tmp_path / name, *options, model=make_model(mlp_type="moe", num_experts=4))
        (line,) = (line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line)
        lines.append({key: value for key, value in line.items() if key.startswith("router")})
    assert lines[0] == lines[1]
    assert sum(lines[0][f"router_load_{expert}"] for expert in range(4)) == pytest.approx(1.0)


def test_a_dense_model_has_no_metrics_of_routers(tmp_path: Path) -> None:
    train(tmp_path, "phases.0.duration=1")
    assert not any(key.startswith("router") for line in read_metrics(tmp_path / "metrics.jsonl") for key in line)
