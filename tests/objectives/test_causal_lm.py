"""Causal language modeling against prefixes and a toy of known entropy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from bertblocks import BertBlocksForMaskedLM
from bertblocks.objectives import CausalLanguageModeling
from bertblocks.training.distributed import World
from bertblocks.training.held_out import HeldOutEvaluator
from bertblocks.training.loop import Trainer
from bertblocks.training.pretraining_task import PretrainingTask
from bertblocks.training.progress import Progress
from bertblocks.training.training_plan import TrainingPlan
from tests.helpers import tiny_config
from tests.objectives.test_objectives import CLS, SEP, VOCABULARY, make_rows
from tests.training.helpers import Documents, make_model, make_recipe, make_vocabulary


def test_every_token_is_the_label_of_the_one_before() -> None:
    rows = make_rows([4, 1, 6])
    batch = CausalLanguageModeling(VOCABULARY).batch(rows, 0)
    ids = [[CLS, *row[0].ids.tolist(), SEP] for row in rows]
    assert batch.input_ids.tolist() == [token for text in ids for token in text]
    assert batch.labels is not None
    assert batch.labels.tolist() == [label for text in ids for label in [*text[1:-1], -100, -100]]
    assert (batch.counts, batch.cu_seqlens.tolist()) == ({"causal_lm": 11}, [0, 6, 9, 17])


def test_the_loss_is_that_of_every_prefix_alone() -> None:
    torch.manual_seed(0)
    model = BertBlocksForMaskedLM(tiny_config(causal=True)).eval()
    rows = make_rows([5, 3], low=5)
    objective = CausalLanguageModeling(VOCABULARY)
    loss = objective.losses(model, objective.batch(rows, 0))["causal_lm"]
    expected = torch.zeros(())
    for row in rows:
        text = [CLS, *row[0].ids.tolist()]
        for end in range(1, len(text)):
            logits = model(torch.tensor([text[:end]])).logits[0, -1]
            expected = expected + F.cross_entropy(logits, torch.tensor(text[end]))
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_a_walk_of_three_equal_choices_is_learned_down_to_its_entropy(tmp_path: Path) -> None:
    """Each token but the first is the one before plus 1, 2 or 3, so no causal model predicts it better than log 3."""
    recipe = make_recipe("objective={kind: causal_lm}", "phases.0.duration=150", "run.evaluation.every=150")
    held_out = HeldOutEvaluator([Documents(1)], make_vocabulary(), 32, 1500)
    objective: Any = recipe.objective.build(make_vocabulary(), make_model().config)
    task = PretrainingTask(TrainingPlan(recipe), {"docstrings": Documents(0, 600)}, [objective], held_out)
    trainer = Trainer(
        make_model(),
        task,
        recipe.optimizer.build,
        recipe.run,
        tmp_path,
        World(0, 1, torch.device("cpu")),
        Progress(Console(quiet=True)),
    )
    trainer.train()
    assert trainer.model.config.causal
    targets, chunks = held_out.targets_for(trainer.model), len(held_out.chunks)
    # the first token of a chunk is one of 60
    floor = ((len(targets) - chunks) * math.log(3) + chunks * math.log(60)) / len(targets)
    assert trainer.evaluation["held_out_loss"] == pytest.approx(floor, rel=0.25)
    assert trainer.evaluation["held_out_loss"] > 0.97 * floor
