"""`bertblocks pretrain` from text files to a model, stopped and continued."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, ElectraForMaskedLM, ElectraForPreTraining
from typer.testing import CliRunner

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, load
from bertblocks.cli.main import app
from bertblocks.core.metrics_file import read_metrics
from bertblocks.data.stream import PackedStream
from bertblocks.text.hub_datasets import stream_dataset
from bertblocks.training.held_out import HeldOutEvaluator, UnigramBaseline
from bertblocks.training.pretrain import implied_keys, is_free_key
from bertblocks.training.recipe import read_recipe
from bertblocks.training.run_folder import differences
from tests.reports.cards import check
from tests.training.helpers import VOCABULARY, Documents, make_model, make_vocabulary

CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A tiny recipe on a few made-up texts."""
    chance = random.Random(0)
    syllables = [first + second for first in "kmstr" for second in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(40)]
    texts = [" ".join(chance.choices(words, k=chance.randint(6, 30))) + "." for _ in range(150)]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    values = {
        "model": {"preset": "mini", "config": CONFIG},
        "tokenizer": {"vocab_size": 200},
        "corpus": {
            "workers": 1,
            "held_out": 0.2,
            "sources": [
                {"name": "words", "files": [str(tmp_path / "texts.txt")]},
                {"name": "long", "files": [str(tmp_path / "texts.txt")], "min_tokens": 20},
            ],
        },
        "optimizer": {"lr": 1e-2},
        "phases": [{"duration": 20, "length": 64, "batch_tokens": 256}],
        "run": {
            "folder": str(tmp_path / "run"),
            "device": "cpu",
            "log_every": 5,
            "evaluation": {"every": 10, "tokens": 500, "pseudo_perplexity_tokens": 30},
            "checkpoints": {"every": 5},
        },
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return path


def run(recipe: Path, *overrides: str) -> Any:
    return CliRunner().invoke(app, ["pretrain", str(recipe), *overrides])


def test_pretrain_turns_texts_into_a_model(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(recipe)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run"
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.mask_token_id, model.config.pad_token_id) == (tokenizer.mask_token_id, tokenizer.pad_token_id)
    result = json.loads((folder / "result.json").read_text())
    metrics = result["metrics"]
    assert metrics["held_out_loss"] < metrics["unigram_loss"] + 0.5
    assert "masked accuracy" in done.output
    assert "[MASK]" in done.output
    assert (folder / "report.html").is_file()
    card = check(folder / "model", monkeypatch)
    assert (card.data.pipeline_tag, card.data.library_name) == ("fill-mask", "bertblocks")
    for groups in (result["by_frequency"], result["by_position"]):
        tokens = sum(group["tokens"] for group in groups)
        mean = sum(group["tokens"] * group["loss"] for group in groups) / tokens
        assert mean == pytest.approx(metrics["held_out_loss"], rel=1e-5)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 5, 10, 10, 15, 20, 20]
    # both sources share one set of tokens
    assert sorted(path.name for path in (folder / "data").iterdir()) == ["tokenizer", "words"]
    assert not (folder / "checkpoints").exists()
    assert "Removed 2 training checkpoints" in done.output

    other = run(recipe, f"run.folder={tmp_path / 'other'}", "run.checkpoints.keep=all")
    assert other.exit_code == 0
    assert json.loads((tmp_path / "other" / "result.json").read_text()) == result, "the same seed, other numbers"
    assert "Removed" not in other.output
    checkpoints = tmp_path / "other" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-{step:08d}" for step in (5, 10, 15, 20)]
    checkpoint = checkpoints / "step-00000020"
    assert AutoTokenizer.from_pretrained(checkpoint).get_vocab() == tokenizer.get_vocab()
    assert json.loads((checkpoint / "recipe.json").read_text())["optimizer"]["lr"] == 1e-2


def test_a_finished_run_does_not_train_again(recipe: Any, tmp_path: Path) -> None:
    options = ("phases.0.duration=4", "run.checkpoints={every: 1, milestones: 3}")
    done = run(recipe, *options)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "recipe.json"}

    before = times()
    again = run(recipe, *options)
    assert again.exit_code == 0, again.output
    assert f"{folder} holds this run, finished" in again.output
    assert "step 4/4" not in again.output
    assert times() == before
    tables = [text.output.partition("Evaluation")[2] for text in (done, again)]
    assert tables[0] == tables[1]
    assert "masked accuracy" in tables[0]
    more = run(recipe, "phases.0.duration=8", *options[1:])
    assert more.exit_code == 1
    assert "holds a run with phases" in more.stderr


@pytest.mark.slow
def test_torchrun_with_shards_gives_the_same_model(recipe: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "bertblocks"]
    options = ["run.parallel=fsdp", "run.precision=fp32", "run.ema=0.9", "phases.0.duration=6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "pretrain", str(recipe), *options],
        capture_output=True, text=True, check=False, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("masked accuracy") == 1, "one process speaks for all"
    assert run(recipe, *options, f"run.folder={tmp_path / 'alone'}").exit_code == 0
    together, alone = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "alone"))
    assert together["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "alone"))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-5)


def test_sigterm_saves_a_checkpoint_and_prints_a_message(recipe: Any, tmp_path: Path) -> None:
    def stop() -> None:
        while not (tmp_path / "run" / "checkpoints").is_dir():
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    done = run(recipe, "phases.0.duration=100000")
    thread.join()
    assert done.exit_code == 143, done.output
    assert "Stopped and saved; run the same command to resume" in done.output


@pytest.mark.parametrize(
    "objective",
    ["{kind: masked_lm, sentence_order: true}", "{kind: sentence_order}", "{kind: masked_diffusion}"],
)
def test_pretrain_runs_every_objective(recipe: Any, tmp_path: Path, objective: Any) -> None:
    done = run(recipe, f"objective={objective}", "phases.0.duration=4", "model.config.type_vocab_size=2")
    assert done.exit_code == 0, done.output
    AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-2]
    assert ("loss_masked_lm" in last) == ("sentence_order: true" in objective)


def test_pretrain_starts_from_a_checkpoint_or_a_grown_model(recipe: Any, tmp_path: Path) -> None:
    assert run(recipe, "phases.0.duration=2").exit_code == 0
    model = tmp_path / "run" / "model"
    values = json.loads(recipe.read_text())
    values["model"] = {"checkpoint": str(model)}
    del values["tokenizer"]
    recipe.write_text(json.dumps(values))
    done = run(recipe, f"run.folder={tmp_path / 'more'}", "phases.0.duration=1", "optimizer.lr=1e-9")
    assert done.exit_code == 0, done.output
    before, after = (AutoModelForMaskedLM.from_pretrained(folder) for folder in (model, tmp_path / "more" / "model"))
    for name, value in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], value)
    values["model"] = {"preset": "mini", "config": {**CONFIG, "num_hidden_layers": 4}, "grow_from": str(model)}
    (tmp_path / "texts.txt").write_text(
        "\n\n".join(f"other words than those, {number} times. " * 4 for number in range(150))
    )
    recipe.write_text(json.dumps(values))
    done = run(recipe, f"run.folder={tmp_path / 'grown'}", "phases.0.duration=1")
    assert done.exit_code == 0, done.output
    vocabularies = [
        AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (model, tmp_path / "grown" / "model")
    ]
    assert vocabularies[0] == vocabularies[1]
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "grown" / "model").config.num_hidden_layers == 4


def test_sentence_order_is_evaluated(recipe: Any, tmp_path: Path) -> None:
    done = run(recipe, "objective.sentence_order=true", "phases.0.duration=2")
    assert done.exit_code == 0, done.output
    assert "sentence-order accuracy" in done.output
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert 0.2 <= metrics["held_out_order_accuracy"] <= 0.8  # two steps do not teach it
    assert metrics["held_out_order_loss"] == pytest.approx(np.log(2), abs=0.3)


def test_implied_config_keys_are_printed() -> None:
    """The keys that config.py derives from `ngpt`, without sizes and without the keys that the recipe sets."""
    recipe = read_recipe("demo", ["model={preset: bert-base, config: {ngpt: true, hidden_size: 384}}"])
    config = BertBlocksConfig.from_preset("bert-base", **recipe.model.config)
    (line,) = implied_keys(recipe, config)
    for implied in ("norm_pos='none'", "mlp_type='glu'", "hidden_act='silu'", "tie_word_embeddings=False"):
        assert implied in line
    assert "hidden_size" not in line
    assert "head_dim" not in line
    assert implied_keys(read_recipe("demo"), BertBlocksConfig.from_preset("modernbert-base")) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lrr=1"], "optimizer has no key 'lrr'"),
        (["phases.0.length=128"], "max_position_embeddings is 64, but a phase has length 128"),
        (["model.config.vocab_size=10"], "vocab_size is 10; the tokenizer has"),
        (["model.config.hiden_size=10"], "hiden_size"),
        (["phases.0.rope_theta=1e5", "model.config.block_pos_enc_kind=alibi"], "no global layer with RoPE"),
        (["corpus.sources=[{name: a, files: [nothing.txt]}]"], "nothing.txt"),
    ],
)
def test_mistakes_in_a_recipe_give_one_sentence(recipe: Any, overrides: Any, message: Any) -> None:
    done = run(recipe, *overrides)
    assert done.exit_code == 1, done.output
    assert message in done.stderr
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.norm_pos=sideways", "norm_pos is 'sideways'"),
        ("phases.0.length=128", "max_position_embeddings is 64, but a phase has length 128"),
    ],
)
def test_a_contradictory_model_is_rejected_before_the_texts_are_read(recipe: Any, override: str, message: str) -> None:
    done = run(recipe, override, "corpus.sources=[{name: a, files: [nothing.txt]}]")
    assert done.exit_code == 1, done.output
    assert message in done.stderr


def test_another_recipe_in_a_run_folder_raises(recipe: Any) -> None:
    assert run(recipe, "phases.0.duration=1").exit_code == 0
    done = run(recipe, "phases.0.duration=1", "optimizer.lr=0.5")
    assert done.exit_code == 1
    assert "holds a run with optimizer.lr = 0.01, but optimizer.lr is now 0.5" in done.stderr
    assert run(recipe, "phases.0.duration=1", "run.micro_batch_tokens=64").exit_code == 0


def test_a_continued_run_keeps_its_tokens_and_may_change_its_precision(recipe: Any, tmp_path: Path) -> None:
    """Texts that change or disappear after the start do not affect the run."""
    keep_all = "run.checkpoints.keep=all"

    def take_back() -> None:
        """The run has not finished, and its last checkpoint does not count any more."""
        (tmp_path / "run" / "result.json").unlink()
        (tmp_path / "run" / "checkpoints" / "step-00000020" / "complete.json").unlink()

    assert run(recipe, keep_all).exit_code == 0
    take_back()
    (tmp_path / "texts.txt").unlink()
    whole = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert run(recipe, keep_all).exit_code == 0
    again = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    take_back()
    assert run(recipe, keep_all, "run.precision=bf16").exit_code == 0
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000020" / "state.json").read_text())
    assert state["precision"] == "bf16"


def test_a_loaded_tokenizer_is_recorded_by_its_path(recipe: Any, tmp_path: Path) -> None:
    made = CliRunner().invoke(
        app, ["tokenizer", "train", str(tmp_path / "own"), str(tmp_path / "texts.txt"), "--vocab-size", "60"]
    )
    assert made.exit_code == 0, made.output
    options = (
        f"tokenizer={{load: {tmp_path / 'own'}}}",
        "phases.0.duration=2",
        "run.checkpoints={every: 1, keep: all}",
    )
    done = run(recipe, *options)
    assert done.exit_code == 0, done.output
    for file in ("recipe.json", "checkpoints/step-00000002/recipe.json"):
        recorded = json.loads((tmp_path / "run" / file).read_text())["tokenizer"]
        assert recorded == {"load": str(tmp_path / "own")}
    entries = len(AutoTokenizer.from_pretrained(tmp_path / "own"))
    page = (tmp_path / "run" / "report.html").read_text()
    report = re.sub(r"<script type=.module.>.*?</script>", "", page, flags=re.DOTALL)
    assert re.search(rf"tokenizer entries\W.*?>{entries}<", report, re.DOTALL)
    assert "8192" not in report
    # version 0.1.0 recorded the defaults of a trained tokenizer
    values = json.loads((tmp_path / "run" / "recipe.json").read_text())
    values["tokenizer"] |= {"kind": "wordpiece", "vocab_size": 8192}
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(values))
    assert "holds this run, finished" in run(recipe, *options).output
    assert "holds a run with tokenizer.load" in run(recipe, *options[1:]).stderr


def test_prepared_tokens_with_another_tokenizer_raise(recipe: Any, tmp_path: Path) -> None:
    invoke = CliRunner().invoke
    for name, size in (("right", "200"), ("wrong", "60")):
        command = ["tokenizer", "train", str(tmp_path / name), str(tmp_path / "texts.txt"), "--vocab-size", size]
        made = invoke(app, command)
        assert made.exit_code == 0, made.output
    options = ["--tokenizer", str(tmp_path / "right"), "--held-out", "0.2", "--workers", "1"]
    made = invoke(app, ["data", "prepare", str(tmp_path / "tokens"), str(tmp_path / "texts.txt"), *options])
    assert made.exit_code == 0, made.output
    source = f"corpus.sources=[{{name: words, tokens: {tmp_path / 'tokens'}}}]"
    done = run(recipe, source, f"tokenizer={{load: {tmp_path / 'wrong'}}}", "phases.0.duration=1")
    assert done.exit_code == 1
    assert "was tokenized with a different tokenizer" in done.stderr
    folder = f"run.folder={tmp_path / 'second'}"
    done = run(recipe, source, f"tokenizer={{load: {tmp_path / 'right'}}}", "phases.0.duration=1", folder)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "second" / "data" / "words").exists()


def test_only_free_keys_may_change_when_a_run_continues() -> None:
    before = {"run": {"seed": 1, "device": "cpu", "checkpoints": {"keep": 1}}, "phases": [{"length": 8}]}
    now = {"run": {"seed": 1, "device": "cuda", "checkpoints": {"keep": 2}}, "phases": [{"length": 9}]}
    assert differences(before, now, is_free_key) == [("phases", [{"length": 8}], [{"length": 9}])]


# ---------------------------------------------------------------------- evaluation


def test_held_out_texts_and_masks_do_not_depend_on_the_length() -> None:
    model = make_model()
    evaluators = [HeldOutEvaluator([Documents(3)], make_vocabulary(), length, 600) for length in (8, 32, 512)]
    targets = [evaluator.targets_for(model) for evaluator in evaluators]
    assert targets[0].tolist() == targets[1].tolist() == targets[2].tolist()


def test_held_out_metrics_equal_a_padded_loop() -> None:
    model, held_out = make_model().eval(), HeldOutEvaluator([Documents(3)], make_vocabulary(), 32, 600)
    losses, right = [], []
    for batch in held_out.batches:
        bounds = batch.cu_seqlens.tolist()
        for start, stop in itertools.pairwise(bounds):
            ids, labels = batch.input_ids[start:stop], batch.labels[start:stop]
            scores = model(ids[None]).logits[0].log_softmax(dim=1)
            for place in (labels != -100).nonzero().flatten().tolist():
                assert ids[place] == 3, "a token that is scored is not hidden"
                losses.append(-scores[place, labels[place]].item())
                right.append(scores[place].argmax().item() == labels[place].item())
    found = held_out.evaluate(model)
    assert found["held_out_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["held_out_accuracy"] == pytest.approx(np.mean(right))
    assert len(held_out.targets_for(model)) == len(losses) > 30


def test_pseudo_perplexity_equals_brute_force() -> None:
    model, held_out = make_model().eval(), HeldOutEvaluator([Documents(3)], make_vocabulary(), 32, 600)
    chunks = iter(held_out.chunks)
    losses: list[Any] = []
    while len(losses) < 40:
        ids = torch.tensor([1, *next(chunks).ids.tolist(), 2])
        for place in range(1, len(ids) - 1):
            hidden = ids.clone()
            hidden[place] = 3
            losses.append(-model(hidden[None]).logits[0, place].log_softmax(dim=0)[ids[place]].item())
    assert held_out.pseudo_perplexity(model, 40) == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_the_unigram_baseline_equals_a_count() -> None:
    documents = Documents(0, count=30)
    counts = [
        1 + sum(int((document == token).sum()) for document in documents.documents) for token in range(VOCABULARY)
    ]
    targets = np.array([5, 9, 9, 60])
    found = UnigramBaseline.count([documents], VOCABULARY).evaluate(targets)
    assert found["unigram_loss"] == pytest.approx(
        -np.mean([np.log(counts[target] / sum(counts)) for target in targets])
    )
    assert found["unigram_accuracy"] == np.mean(targets == int(np.argmax(counts)))


def test_filled_masks_show_the_models_predictions(recipe: Any, tmp_path: Path) -> None:
    assert run(recipe, "phases.0.duration=2").exit_code == 0
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").eval()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    filled = result["filled"][0]
    logits = model(**tokenizer(filled["text"], return_tensors="pt")).logits[0]
    place = tokenizer(filled["text"])["input_ids"].index(tokenizer.mask_token_id)
    best = logits[place].softmax(dim=0).topk(3)
    assert [word for word, _ in filled["guesses"]] == [tokenizer.decode([index]) for index in best.indices.tolist()]
    assert [share for _, share in filled["guesses"]] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_replaced_token_detection_trains_and_writes_both_models(recipe: Any, tmp_path: Path) -> None:
    """A run that is continued from its middle gives the same two models, to the bit."""
    objective = "objective={kind: replaced_tokens, generator: {num_hidden_layers: 1}}"
    settings = [objective, "phases.0.duration=8", "run.checkpoints={every: 4, keep: all}"]
    done = run(recipe, *settings)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run"
    whole = {name: load_file(folder / name / "model.safetensors") for name in ("model", "generator")}
    assert max(map(len, whole.values())) > 10
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    detection = {"held_out_detection_loss", "held_out_detection_accuracy", "held_out_detection_recall"}
    assert detection <= set(metrics)
    lines = read_metrics(folder / "metrics.jsonl")
    assert all(
        line["loss"] == pytest.approx(line["loss_generator"] + line["loss_discriminator"]) for line in lines[1:2]
    )
    generator = load(folder / "generator")[0]
    assert (type(generator).__name__, generator.config.num_hidden_layers) == ("BertBlocksForMaskedLM", 1)
    discriminator = load(folder / "model")[0]
    assert type(discriminator).__name__ == "BertBlocksForReplacedTokenDetection"
    # the discriminator's own table is added to the generator's
    tables = [whole[name]["model.embedding.token.weight"] for name in ("model", "generator")]
    last = load_file(folder / "checkpoints" / "step-00000008" / "model.safetensors")
    own = last["discriminator.model.embedding.token.weight"]
    assert own.abs().sum() > 0
    assert torch.equal(tables[0], own + tables[1])

    for left in ("model", "generator", "checkpoints/step-00000008"):
        shutil.rmtree(folder / left)
    (folder / "result.json").unlink()
    assert "step-00000004" in run(recipe, *settings).output
    for name, weights in whole.items():
        for key, value in load_file(folder / name / "model.safetensors").items():
            assert torch.equal(value, weights[key]), key


def test_generator_and_discriminator_become_transformers_electra_models(recipe: Any, tmp_path: Path) -> None:
    values = read_recipe("electra-small").model.config
    narrow = {**values, "hidden_size": 16, "embedding_size": 8, "intermediate_size": 24, "num_hidden_layers": 1}
    model = json.dumps({"preset": "bert-base", "config": {**narrow, "max_position_embeddings": 64}})
    settings = ["objective={kind: replaced_tokens, sharing: tied}", "phases.0.duration=2"]
    done = run(recipe, f"model={model}", *settings, "run.evaluation={every: null, pseudo_perplexity_tokens: 0}")
    assert done.exit_code == 0, done.output
    kinds: dict[str, Any] = {"model": ElectraForPreTraining, "generator": ElectraForMaskedLM}
    for name, kind in kinds.items():
        source, target = str(tmp_path / "run" / name), str(tmp_path / name)
        assert CliRunner().invoke(app, ["convert", source, target, "--to", "electra"]).exit_code == 0
        theirs, report = kind.from_pretrained(target, output_loading_info=True)
        assert not report["missing_keys"]
        ours, tokenizer = load(source)
        assert tokenizer is not None
        ids = tokenizer("maka rosu", return_tensors="pt").input_ids
        torch.testing.assert_close(theirs.eval()(ids).logits, ours.eval()(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "terms"),
    [
        ("{kind: retromae, rate: 0.2, decoder_rate: 0.6}", ["encoder", "decoder"]),
        ("{kind: masked_lm, bag_of_subwords: 0.5, isotropy: 0.1}", ["masked_lm", "bag_of_subwords", "isotropy"]),
        ("{kind: enhanced_masked_lm}", []),
    ],
)
def test_objectives_with_parts_of_their_own_write_the_encoder_only(
    recipe: Any, tmp_path: Path, objective: Any, terms: Any
) -> None:
    """A run that is continued from its middle gives the same model, to the bit, and it has no part of the training."""
    settings = [f"objective={objective}", "phases.0.duration=4", "run.checkpoints={every: 2, keep: all}"]
    settings += ["run.log_every=1", "run.evaluation={every: null, pseudo_perplexity_tokens: 0}"]
    done = run(recipe, *settings)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run"
    whole = load_file(folder / "model" / "model.safetensors")
    plain = BertBlocksForMaskedLM(load(folder / "model")[0].config)
    assert set(whole) == {name for name, _ in plain.named_parameters()}
    line = read_metrics(folder / "metrics.jsonl")[0]
    assert {key for key in line if key.startswith("loss_")} == {f"loss_{term}" for term in terms}
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    shutil.rmtree(folder / "model")
    (folder / "result.json").unlink()
    assert "step-00000002" in run(recipe, *settings).output
    for key, value in load_file(folder / "model" / "model.safetensors").items():
        assert torch.equal(value, whole[key]), key


def test_a_causal_phase_and_a_masked_phase_train_the_same_weights(recipe: Any, tmp_path: Path) -> None:
    phases = [
        {"name": "causal", "duration": 4, "length": 64, "batch_tokens": 256},
        {"name": "masked", "duration": 4, "objective": {"kind": "masked_lm"}},
    ]
    settings = [
        "objective={kind: causal_lm}",
        f"phases={json.dumps(phases)}",
        "run.log_every=4",
        "run.evaluation.every=4",
    ]
    done = run(recipe, *settings, "run.checkpoints={every: 4, keep: all}")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "run"
    configs = [folder / "checkpoints" / "step-00000004", folder / "model"]
    assert [json.loads((path / "config.json").read_text())["causal"] for path in configs] == [True, False]
    assert [line["phase"] for line in read_metrics(folder / "metrics.jsonl") if "phase" in line] == ["causal", "masked"]
    before, after = (load_file(path / "model.safetensors") for path in configs)
    assert before.keys() == after.keys()
    assert "pseudo_perplexity" in json.loads((folder / "result.json").read_text())["metrics"]
    with_key = run(recipe, "model.config.causal=true")
    assert "model.config.causal follows from the objective of each phase" in with_key.output


def test_a_causal_run_reports_its_perplexity(recipe: Any, tmp_path: Path) -> None:
    done = run(recipe, "objective={kind: causal_lm}", "phases.0.duration=4")
    assert done.exit_code == 0, done.output
    assert "next-token loss" in done.output
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["held_out_loss"]))
    assert "pseudo_perplexity" not in metrics


def stream_recipe(recipe: Path, tmp_path: Path) -> list[str]:
    """Overrides that stream the recipe's texts from a dataset of three files, in two phases."""
    texts = (tmp_path / "texts.txt").read_text().split("\n\n")
    (tmp_path / "dataset").mkdir()
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::3]]
        (tmp_path / "dataset" / f"train-{number}.jsonl").write_text("".join(lines))
    phases = "[{duration: 6, length: 16, batch_tokens: 512}, {duration: 4, length: 24, batch_tokens: 480}]"
    return [
        f"corpus.sources=[{{name: web, dataset: {tmp_path / 'dataset'}, stream: 1}}]",
        f"phases={phases}",
        "run.checkpoints={every: 2, keep: all}",
    ]


def test_a_streamed_run_resumes_exactly_and_keeps_few_tokens_on_disk(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertblocks.training.pretraining_task.PackedStream", partial(PackedStream, pool_rows=40))
    options = stream_recipe(recipe, tmp_path)
    whole = run(recipe, *options)
    assert whole.exit_code == 0, whole.output
    assert "Corpus web (first part): " in whole.output
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000010" / "state.json").read_text())
    part = state["position"]["cursors"]["web"][0]
    assert part >= 3
    on_disk = [int(path.name.removeprefix("part-")) for path in (tmp_path / "run" / "data" / "web").glob("part-*")]
    assert min(on_disk) >= part - 1
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    (resumed / "result.json").unlink()
    shutil.rmtree(resumed / "model")
    for step in (6, 8, 10):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    for old in (resumed / "data" / "web").glob("part-*"):
        shutil.rmtree(old)
    again = run(recipe, *options, f"run.folder={resumed}")
    assert again.exit_code == 0, again.output
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_texts_may_change_before_the_first_checkpoint_of_a_streamed_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertblocks.training.pretraining_task.PackedStream", partial(PackedStream, pool_rows=40))
    options = [*stream_recipe(recipe, tmp_path), "phases.0.duration=2", "phases.1.duration=1"]
    with monkeypatch.context() as patch:
        patch.setattr("bertblocks.training.pretrain.build_model", lambda *arguments: 1 / 0)
        assert isinstance(run(recipe, *options).exception, ZeroDivisionError)
    with (tmp_path / "dataset" / "train-0.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more text"}) + "\n")
    stream_dataset.cache_clear()  # a new process would read the files again
    done = run(recipe, *options)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["corpus.sources=[{files: [x], stream: 1}]", "phases.0.curriculum=4"], "curriculum needs the lengths of all"),
        (
            ["corpus={sources: [{files: [x], stream: 1}], temperature: 2}"],
            "the streamed source 'docstrings' is unknown",
        ),
        (["corpus.sources=[{files: [x], stream: 1, dedup: 0.8}]"], "has stream and dedup"),
        (["corpus.sources=[{builtin: docstrings, stream: 1}]"], "works with files and dataset only"),
        (["corpus.sources=[{tokens: x, dedup: 0.8}]"], "pass --dedup to `bertblocks data prepare`"),
        (["corpus.sources=[{files: [x], dedup: 1.5}]"], "dedup"),
        (["phases.0.curriculum=1"], "curriculum"),
    ],
)
def test_impossible_corpora_give_one_sentence(recipe: Path, overrides: Any, message: str) -> None:
    done = run(recipe, *overrides)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())


def test_a_run_without_near_duplicates_and_with_a_curriculum(recipe: Path, tmp_path: Path) -> None:
    texts = (tmp_path / "texts.txt").read_text()
    (tmp_path / "texts.txt").write_text(texts + "\n\n" + "\n\n".join(texts.split("\n\n")[:9]))
    done = run(recipe, f"corpus.sources=[{{name: words, files: [{tmp_path / 'texts.txt'}], dedup: 0.9}}]",
               "phases.0.curriculum=4", "phases.0.duration=6")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "9 near-duplicates removed." in done.output
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["phases"][0]["curriculum"] == 4


def test_the_command_streams_events(recipe: Any, tmp_path: Path) -> None:
    done = run(recipe, "--json")
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events[:3]] == ["start", "evaluation", "step"]
    assert (events[1]["step"], events[2]["step"], events[-1]["event"]) == (0, 5, "result")
    assert events[-1]["metrics"] == json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
