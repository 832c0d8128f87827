"""Saving, loading through transformers' Auto classes in a new process, and bad files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertblocks import BertBlocksForMaskedLM, BertBlocksForSequenceClassification, BertBlocksModel
from bertblocks.models import TASK_MODELS
from tests.helpers import tiny_config

AUTO_CLASSES = {
    "base": "AutoModel",
    "masked-lm": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def new_process(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process prints that imports more and more; it takes seconds to start, so several tests share it."""
    folder = tmp_path_factory.mktemp("auto")
    ids = torch.tensor([[1, 2, 3, 4]])
    for task in AUTO_CLASSES:
        model = TASK_MODELS[task](tiny_config(num_labels=3)).eval()
        model.save_pretrained(folder / task)
        torch.save(model(ids, return_dict=False)[0].detach(), folder / task / "expected.pt")
    out = run(f"""
import sys, bertblocks
heavy = ("torch", "transformers", "datasets", "flax", "jax", "peft")
print(*(name for name in heavy if name in sys.modules))
from transformers import AutoConfig
print(type(AutoConfig.for_model("bertblocks")).__name__)
import bertblocks.models, bertblocks.checkpoints.load, bertblocks.cli.main
print(*(name for name in heavy if name in sys.modules))
import torch, transformers
for task, name in {AUTO_CLASSES!r}.items():
    model = getattr(transformers, name).from_pretrained({str(folder)!r} + "/" + task).eval()
    expected = torch.load({str(folder)!r} + "/" + task + "/expected.pt", weights_only=True)
    torch.testing.assert_close(model(torch.tensor({ids.tolist()}), return_dict=False)[0], expected)
    print(type(model).__name__)
""")
    return out.splitlines()


def test_import_does_not_load_heavy_packages(new_process: list[str]) -> None:
    assert new_process[0] == ""
    assert new_process[2] == "torch transformers"


def test_auto_classes_load_every_task_after_an_import_of_bertblocks(new_process: list[str]) -> None:
    assert new_process[1] == "BertBlocksConfig"
    assert new_process[3:] == [TASK_MODELS[task].__name__ for task in AUTO_CLASSES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "from transformers import AutoConfig; import bertblocks",
        "import bertblocks, transformers.modeling_layers; from transformers import AutoConfig",
        "import bertblocks.config; from transformers import AutoConfig",
    ],
)
def test_auto_config_works_in_any_order_of_imports(imports: Any) -> None:
    code = f"{imports}; print(type(AutoConfig.for_model('bertblocks')).__name__)"
    assert run(code).strip() == "BertBlocksConfig"


# ---------------------------------------------------------------------- between tasks


def test_a_pretrained_encoder_gets_a_new_head(tmp_path: Path) -> None:
    pretrained = BertBlocksForMaskedLM(tiny_config())
    pretrained.save_pretrained(tmp_path)
    model = BertBlocksForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert model.classifier.weight.shape == (3, 32)
    assert torch.equal(model.model.embedding.token.weight, pretrained.model.embedding.token.weight)
    base = BertBlocksModel.from_pretrained(tmp_path)
    assert torch.equal(base.encoder.layers[1].mlp.up.weight, pretrained.model.encoder.layers[1].mlp.up.weight)
    for other in (model, base):
        for name, parameter in other.named_parameters():
            assert torch.isfinite(parameter).all(), name


def test_an_encoder_loaded_from_a_task_checkpoint_has_its_weights_and_pooler(tmp_path: Path) -> None:
    classifier = BertBlocksForSequenceClassification(tiny_config())
    classifier.save_pretrained(tmp_path)
    base = BertBlocksModel.from_pretrained(tmp_path)
    assert torch.equal(base.pooler.dense.weight, classifier.model.pooler.dense.weight)


# ---------------------------------------------------------------------- bad files


def damage(folder: Any, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-50])
    elif how == "not safetensors":
        weights.write_bytes(b"\x80\x04 this is not a tensor file")
    elif how == "pickle only":
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    elif how == "config key":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "norm_fnn": "rms"}))
    else:
        tensors = load_file(weights)
        query = "model.encoder.layers.1.attention.qkv.weight"
        if how == "missing in the encoder":
            del tensors[query]
        elif how == "half a head":
            del tensors["head.dense.bias"]
        elif how == "extra in the encoder":
            tensors["model.encoder.layers.7.attention.qkv.weight"] = tensors[query].clone()
        elif how == "wrong shape":
            tensors[query] = tensors[query][:-1].contiguous()
        save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"model\.safetensors is damaged"),
        ("not safetensors", r"model\.safetensors is damaged"),
        ("pickle only", r"model\.safetensors"),
        ("config key", r"'norm_fnn' is not a key of BertBlocksConfig .*did you mean 'norm_fn'"),
        ("missing in the encoder", r"lacks 'model\.encoder\.layers\.1\.attention\.qkv\.weight'"),
        ("half a head", r"lacks 'head\.dense\.bias'"),
        (
            "extra in the encoder",
            r"has 'model\.encoder\.layers\.7\.attention\.qkv\.weight', which does not belong to its config",
        ),
        ("wrong shape", r"layers\.1\.attention\.qkv\.weight has shape \[95, 32\]; its config asks for \[96, 32\]"),
    ],
)
def test_bad_files_raise_and_never_load_partially(tmp_path: Path, how: Any, message: Any) -> None:
    BertBlocksForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    damage(tmp_path, how)
    with pytest.raises((OSError, ValueError, RuntimeError), match=message):
        BertBlocksForMaskedLM.from_pretrained(tmp_path)


def test_from_pretrained_never_reads_pickles(tmp_path: Path) -> None:
    BertBlocksForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    damage(tmp_path, "pickle only")
    with pytest.raises(ValueError, match="never pickles"):
        BertBlocksForMaskedLM.from_pretrained(tmp_path, use_safetensors=False)


def test_a_saved_model_loads_completely(tmp_path: Path) -> None:
    for options in ({}, {"ngpt": True, "ngpt_logit_scale": True}, {"tie_word_embeddings": False, "qk_norm": True}):
        model = BertBlocksForMaskedLM(tiny_config(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        again = BertBlocksForMaskedLM.from_pretrained(tmp_path)
        assert again.config.to_json_string() == model.config.to_json_string()
        assert set(again.state_dict()) == set(model.state_dict())
        for key, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], tensor), key
        for file in tmp_path.iterdir():
            file.unlink()
