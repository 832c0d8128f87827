"""Damaged and hostile checkpoint folders raise an error of one sentence and never load a different model."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bertblocks
from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM, BertBlocksModel
from bertblocks.checkpoints.merge import merge
from bertblocks.checkpoints.save import save_huggingface, save_model
from bertblocks.checkpoints.sentence_transformers import read_settings
from tests.checkpoints.family_cases import FAMILY_CASES, SIZES
from tests.helpers import tiny_config
from tests.small_tokenizers import wrap

DEEP = "[" * 100_000 + "]" * 100_000


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def small_bert() -> BertBlocksModel:
    return BertBlocksModel(BertBlocksConfig(**SIZES))


def load_or_message(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """The weights of a folder, or the message of the OSError or ValueError that loading it raises."""
    try:
        return bertblocks.load(folder)[0].state_dict(), ""
    except (OSError, ValueError) as error:
        return {}, str(error) or "no message"


# ---------------------------------------------------------------------- checksums


@pytest.fixture(params=["bertblocks", "bert", "save_pretrained"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = small_bert()
    if request.param == "bert":
        save_huggingface(model, tmp_path / "model", "bert")
    elif request.param == "save_pretrained":
        model.save_pretrained(tmp_path / "model")
    else:
        save_model(model, tmp_path / "model")
    return tmp_path / "model"


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_a_flipped_bit_never_loads_different_weights(saved: Any) -> None:
    weights = saved / "model.safetensors"
    intact, expected = weights.read_bytes(), bertblocks.load(saved)[0].state_dict()
    generator = random.Random(0)
    rejected = 0
    for _ in range(25):
        damaged = bytearray(intact)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        weights.write_bytes(bytes(damaged))
        actual, message = load_or_message(saved)
        assert len(message) < 500
        rejected += bool(message)
        assert message or all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert rejected > 20


def test_checksum_verification_can_be_turned_off(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_last_bit(saved / "model.safetensors")
    with pytest.raises(OSError, match=r"model\.safetensors is damaged: its checksum is wrong"):
        bertblocks.load(saved)
    monkeypatch.setenv("BERTBLOCKS_VERIFY", "0")
    bertblocks.load(saved)


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ({}, "model.safetensors"),
        ({"max_shard_size": "20KB"}, "model-00002-of-"),
        ({"variant": "fp32"}, "model.fp32.safetensors"),
    ],
)
def test_from_pretrained_verifies_what_save_pretrained_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, file: str
) -> None:
    model = BertBlocksModel(tiny_config())
    model.save_pretrained(tmp_path / "model", **options)
    flip_last_bit(next(path for path in (tmp_path / "model").iterdir() if path.name.startswith(file)))
    loading = {key: value for key, value in options.items() if key == "variant"}
    for source, subfolder in ((tmp_path / "model", ""), (tmp_path, "model")):
        for kind in (BertBlocksModel, transformers.AutoModel):
            with pytest.raises(OSError, match=rf"{file}.* is damaged: its checksum is wrong"):
                kind.from_pretrained(source, subfolder=subfolder, **loading)
    monkeypatch.setenv("BERTBLOCKS_VERIFY", "0")
    BertBlocksModel.from_pretrained(tmp_path / "model", **loading)


def test_from_pretrained_verifies_weights_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached download is a folder of links by revision."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    small_bert().save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    options: Any = {"cache_dir": str(tmp_path), "local_files_only": True}
    model = BertBlocksModel.from_pretrained("someone/model", **options)
    assert model.name_or_path == "someone/model"
    flip_last_bit(snapshot / "model.safetensors")
    with pytest.raises(OSError, match=r"model\.safetensors is damaged: its checksum is wrong"):
        BertBlocksModel.from_pretrained("someone/model", **options)


def test_from_pretrained_reads_only_files_in_the_folder(tmp_path: Path) -> None:
    model = BertBlocksModel(tiny_config())
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    shards[0].rename(tmp_path / "outside.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    text = index.read_text()
    for outside in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index.write_text(text.replace(shards[0].name, outside))
        with pytest.raises(FileNotFoundError, match=rf"names {outside}, which is not a file in that folder"):
            BertBlocksModel.from_pretrained(tmp_path / "model")


def test_saving_without_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTBLOCKS_VERIFY", "0")
    small_bert().save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    small_bert().save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_weights_that_another_library_rewrites_load_without_a_checksum(saved: Any) -> None:
    tensors = load_file(saved / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, saved / "model.safetensors", {"format": "pt"})
    bertblocks.load(saved)


def test_saved_files_equal_those_of_transformers(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config())
    model.save_pretrained(tmp_path / "theirs")
    save_model(model, tmp_path / "ours")
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert json.loads((tmp_path / "ours/config.json").read_text()) == json.loads(
        (tmp_path / "theirs/config.json").read_text()
    )
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_saved_models_are_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = set()
    fsync = os.fsync

    def record(descriptor: Any) -> None:
        flushed.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save_huggingface(small_bert(), tmp_path / "model", "bert")
    assert {"config.json", "model.safetensors", "model"} <= flushed
    flushed.clear()
    small_bert().save_pretrained(tmp_path / "theirs")
    assert {"model.safetensors", "theirs"} <= flushed


# ---------------------------------------------------------------------- hostile files


def own(folder: Path) -> Path:
    BertBlocksModel(tiny_config(num_hidden_layers=1)).save_pretrained(folder)
    return folder


def bert(folder: Path) -> Path:
    transformers.BertModel(FAMILY_CASES["bert"].make_config()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [own, bert])
def test_an_index_cannot_name_files_outside_the_folder(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "model")
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../outside.safetensors")}))
    with pytest.raises(FileNotFoundError, match=r"index\.json names \.\./outside\.safetensors, which is not a file"):
        bertblocks.load(folder)


@pytest.mark.parametrize("make", [own, bert])
@pytest.mark.parametrize("content", ["[1]", '{"weight_map": 3}', '{"weight_map": {"a": {}}}', "{}", DEEP, "\x00"])
def test_a_malformed_index_gives_one_sentence(tmp_path: Path, make: Any, content: Any) -> None:
    folder = make(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises((OSError, ValueError), match=r"model\.safetensors\.index\.json"):
        bertblocks.load(folder)


@pytest.mark.parametrize("make", [own, bert])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": 1e-320},
        {"dtype": [1]},
        {"head_dim": 2**64, "num_kv_heads": 2**64},
        {"hidden_size": 2**64},
        {"intermediate_size": 2**64},
        {"vocab_size": 2**70},
        {"num_attention_heads": 0},
        {"architectures": {"a": 1}},
        {"architectures": [3]},
        {"architectures": [[3]]},
        {"model_type": []},
    ],
    ids=str,
)
def test_impossible_config_values_give_one_sentence(tmp_path: Path, make: Any, changes: Any) -> None:
    folder = make(tmp_path / "model")
    edit(folder / "config.json", **changes)
    _, message = load_or_message(folder)
    assert len(message) < 1000
    # transformers' configs ignore keys that they do not know
    assert message or set(changes) & {"head_dim", "dtype"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [DEEP, "[1]", "3", '{"model": 1, "auto_map": 2, "added_tokens": 5}', "{"])
def test_other_malformed_files_give_one_sentence(tmp_path: Path, name: Any, content: Any) -> None:
    folder = own(tmp_path / "model")
    wrap("wordpiece").save_pretrained(folder)
    (folder / name).write_text(content)
    _, message = load_or_message(folder)
    assert len(message) < 1000
    assert message or name == "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", DEEP, "modules.json is not valid JSON"),
        ("modules.json", "{}", "modules.json holds a dict"),
        ("modules.json", "[3]", "module 0 must have a type and a path"),
        ("modules.json", '[{"type": 3, "path": ""}]', "module 0 must have a type and a path"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../x"}]', "must be a folder inside"),
        ("sentence_bert_config.json", '{"max_seq_length": "12"}', "max_seq_length is '12'"),
        ("sentence_bert_config.json", '{"max_seq_length": -1}', "max_seq_length is -1"),
        ("sentence_bert_config.json", "[]", "holds a list"),
        ("config_sentence_transformers.json", '{"prompts": [1]}', "prompts must map names to texts"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "prompts must map names to texts"),
        ("config_sentence_transformers.json", '{"default_prompt_name": 1}', "default_prompt_name is 1"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "a"}', "'a'; it must be one of query, document"),
        ("1_Pooling/config.json", '{"pooling_mode": {"a": 1}}', "it must be one or several of cls, max, mean"),
        ("1_Pooling/config.json", '{"pooling_mode": [[1], 2]}', "it must be one or several of cls, max, mean"),
    ],
)
def test_settings_of_sentence_transformers_are_checked(tmp_path: Path, name: Any, content: Any, message: Any) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path)


@pytest.mark.parametrize("content", [DEEP, "[1]", "{"])
def test_merge_raises_for_a_bad_tokenizer_file(tmp_path: Path, content: Any) -> None:
    for name in ("a", "b"):
        (own(tmp_path / name) / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"a/tokenizer\.json"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")


def test_unreadable_files_are_not_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bert(tmp_path / "model")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(".safetensors"))
    with pytest.raises(PermissionError, match=r"model\.safetensors cannot be read: permission denied"):
        bertblocks.load(folder)


def test_a_full_disk_in_quantize_gives_one_sentence(tmp_path: Path, warm_python: list[str]) -> None:
    bert(tmp_path / "theirs")
    code = f"""
import resource, signal, sys
from bertblocks.cli.main import main
import bertblocks.checkpoints.quantize
sys.dont_write_bytecode = True  # Python does not notice that a file is cut
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.argv = ["bertblocks", "quantize", {str(tmp_path / "theirs")!r}, {str(tmp_path / "out")!r}, "--min-cosine", "0"]
main()
"""
    done = subprocess.run([*warm_python, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
