"""The commands that describe encoders, and the command line as a whole."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import bertblocks
from bertblocks import BertBlocksConfig, preset_names
from bertblocks.cli.main import app
from bertblocks.cli.options import TaskName
from bertblocks.models import TASK_MODELS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _same_verbosity() -> Iterator[Any]:
    """Restores transformers' verbosity, which commands change."""
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)


def run(*arguments: str, expect: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expect, result.output
    return result


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def parameter_count(config: BertBlocksConfig, task: str) -> int:
    return sum(parameter.numel() for parameter in TASK_MODELS[task](config).parameters())


# ---------------------------------------------------------------------- help and version


def test_help_does_not_import_heavy_packages() -> None:
    program = (
        "import sys\n"
        "from bertblocks.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'bertblocks.config'} & set(sys.modules)\n"
        "    print(sorted(heavy), file=sys.stderr)\n"
    )
    for arguments in (["--help"], ["describe", "--help"], ["--version"]):
        result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert result.stdout.strip()
        assert result.stderr.strip() == "[]"


def test_version_prints_the_version() -> None:
    assert run("--version").stdout == f"bertblocks {bertblocks.__version__}\n"


def test_help_names_every_command() -> None:
    assert all(command in run("--help").stdout for command in ("describe", "compare", "presets"))


def test_the_help_of_a_finetuning_task_lists_its_settings() -> None:
    text = run("finetune", "tag", "--help").stdout
    assert "every_piece" in text
    assert "Labels all tokens of a word" in text


def test_a_setting_may_be_written_as_an_option(tmp_path: Path) -> None:
    error = run("finetune", "classify", "--epochs", "-3", "--model", tmp_path, "--train", "x.csv", expect=1).stderr
    assert "epochs" in error


def test_a_model_that_is_neither_a_folder_nor_on_the_hub_raises_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = run("embed", "nosuchmodel", "plain", expect=1).stderr
    assert error.startswith("bertblocks: nosuchmodel is not a folder, and it could not be downloaded")


# ---------------------------------------------------------------------- describe


def test_describe_shows_modules_parameters_and_cost() -> None:
    text = run("describe", "modernbert-base").stdout
    assert text.startswith("modernbert-base  ModernBERT-base (Warner et al., 2024)\n22 layers of 768")
    assert "(1-2, 4-5, 7-8, ..., 19-20): 14 x Block(local)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["total", "149,655,232", "100.0%"] in rows
    assert ["attention", "51,904,512", "34.7%"] in rows
    assert rows.count(["length", "128", "512", "2048", "8192"]) == 2
    assert ["head", *["78.54", "M"] * 4] in rows


@pytest.mark.parametrize("task", typing.get_args(TaskName))
def test_describe_counts_the_head_of_the_task(task: Any) -> None:
    found = run_json("describe", "mini", "--task", task, "--length", "8")
    assert found["task"] == task
    assert found["parameters"]["total"] == parameter_count(BertBlocksConfig.from_preset("mini"), task)
    assert found["tree"]["kind"] == TASK_MODELS[task].__name__


def test_describe_json_contains_everything() -> None:
    found = run_json("describe", "mini", "--length", "16", "--length", "64")
    assert set(found) == {"name", "description", "summary", "task", "config", "parameters", "costs", "tree"}
    assert found["config"]["layer_types"] == ["global", "local", "local", "global"]
    assert [cost["length"] for cost in found["costs"]] == [16, 64]
    for cost in found["costs"]:
        assert cost["flops_per_token"]["total"] * cost["length"] == pytest.approx(cost["flops"]["total"])
        assert 0 < cost["inference_bytes"] < cost["training_bytes"]
    layers = found["tree"]["children"][0]["children"][1]["children"][0]["children"]
    assert [layer["layers"] for layer in layers] == [[0], [1, 2], [3]]


def test_describe_omits_lengths_beyond_learned_positions() -> None:
    assert [cost["length"] for cost in run_json("describe", "bert-base")["costs"]] == [128, 512]
    error = run("describe", "bert-base", "--length", "513", expect=1).stderr
    assert error == "bertblocks: The length is 513; it must be from 1 to 512, the number of learned positions.\n"


def test_describe_reads_folders_and_files_of_every_family(tmp_path: Path) -> None:
    own = BertBlocksConfig.from_preset("mini", layer_overrides={1: {"hidden_act": "silu"}})
    own.save_pretrained(tmp_path / "own")
    theirs = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.ModernBertConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=2).save_pretrained(
        tmp_path / "modern"
    )
    (tmp_path / "keys.json").write_text('{"num_hidden_layers": 2, "hidden_size": 24}')

    assert run_json("describe", tmp_path / "own")["config"]["layer_overrides"] == {"1": {"hidden_act": "silu"}}
    found = run_json("describe", tmp_path / "theirs", "--task", "base")
    assert found["parameters"]["total"] == transformers.BertModel(theirs).num_parameters()
    assert found["description"] == "a config of the bert family"
    assert run_json("describe", tmp_path / "theirs" / "config.json", "--task", "base")["costs"] == found["costs"]
    assert run_json("describe", tmp_path / "modern")["config"]["norm_pos"] == "pre"
    assert run_json("describe", tmp_path / "keys.json")["config"]["head_dim"] == 2


def test_a_preset_takes_precedence_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BertBlocksConfig.from_preset("mini", num_hidden_layers=2).save_pretrained(tmp_path / "mini")
    monkeypatch.chdir(tmp_path)
    assert run_json("describe", "mini")["config"]["num_hidden_layers"] == 4
    assert run_json("describe", "./mini")["config"]["num_hidden_layers"] == 2


def test_describe_mermaid_prints_only_a_flowchart() -> None:
    lines = run("describe", "mini", "--task", "sequence-classification", "--mermaid").stdout.splitlines()
    assert lines[0] == "flowchart TD"
    assert '    pooling["pooling: mean"]' in lines
    assert lines[-1] == "    classifier --> output"


# ---------------------------------------------------------------------- compare


def test_compare_shows_differences_and_ratios(tmp_path: Path) -> None:
    BertBlocksConfig.from_preset("mini", norm_fn="rms", intermediate_size=192).save_pretrained(tmp_path)
    found = run_json("compare", "mini", tmp_path)
    assert found["config"] == {"intermediate_size": {"a": 96, "b": 192}, "norm_fn": {"a": "layer", "b": "rms"}}
    assert found["parameters"]["feed-forward"] == {"a": 4 * 3 * 64 * 96, "b": 4 * 3 * 64 * 192, "ratio": 2.0}
    assert found["flops_per_token"]["128"]["feed-forward"]["ratio"] == 2.0
    assert found["flops_per_token"]["128"]["attention projections"]["ratio"] == 1.0

    rows = [line.split() for line in run("compare", "mini", tmp_path).stdout.splitlines()]
    assert ["norm_fn", '"layer"', '"rms"'] in rows
    assert ["feed-forward", "73,728", "147,456", "2.00"] in rows


def test_compare_shows_active_parameters_if_one_model_has_experts(tmp_path: Path) -> None:
    BertBlocksConfig.from_preset("mini", layer_overrides={1: {"mlp_type": "moe"}}).save_pretrained(tmp_path)
    for pair in (("mini", tmp_path), (tmp_path, "mini")):
        counts = run_json("compare", *pair)["parameters"]
        dense, mixture = ("a", "b") if pair[0] == "mini" else ("b", "a")
        assert counts["active"][dense] == counts["total"][dense] == 277_120
        # eight networks, of which a token uses two: up and down matrices without biases
        assert counts["total"][mixture] - counts["active"][mixture] == 6 * 2 * 64 * 96


def test_compare_abbreviates_layers_and_omits_undefined_ratios() -> None:
    rows = [" ".join(line.split()) for line in run("compare", "modernbert-base", "bert-base").stdout.splitlines()]
    assert "layer_types global: 0, 3, 6, ..., 21; local: 1-2, 4-5, 7-8, ..., 19-20 global: 0-11" in rows
    assert "position and type embedding 0 394,752 -" in rows
    assert {row.split()[0] for row in rows if "attention over keys" in row} == {"128", "512"}


def test_compare_reports_that_nothing_differs(tmp_path: Path) -> None:
    BertBlocksConfig.from_preset("mini").save_pretrained(tmp_path)
    text = run("compare", "mini", tmp_path).stdout
    assert text == f"Nothing differs: mini and {tmp_path} are the same architecture of 277,120 parameters.\n"
    assert run_json("compare", "mini", tmp_path)["config"] == {}


# ---------------------------------------------------------------------- presets


def test_presets_lists_all_presets() -> None:
    rows = run_json("presets")
    assert [row["name"] for row in rows] == preset_names()
    by_name = {row["name"]: row for row in rows}
    assert by_name["modernbert-large"] == {
        "name": "modernbert-large",
        "description": "ModernBERT-large (Warner et al., 2024)",
        "layers": 28,
        "hidden": 1024,
        "heads": 16,
        "parameters": 395_881_664,
    }
    lines = run("presets").stdout.splitlines()
    assert all(any(row["name"] in line and f"{row['parameters']:,}" in line for line in lines) for row in rows)


# ---------------------------------------------------------------------- output


def test_piped_output_is_neither_truncated_nor_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for command in (["presets"], ["describe", "bert-base"], ["compare", "bert-base", "modernbert-base"]):
        text = run(*command).stdout
        assert "…" not in text
        assert "\x1b" not in text
    assert "modernbert-embed-large: ModernBERT-large, mean-pooled for sentence embeddings " in run("presets").stdout


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{bad", "is not valid JSON"),
        ("[1]", "holds a list, not a JSON object"),
        ('{"model_type": "gpt2"}', "model_type is 'gpt2'; BertBlocks reads the families bert"),
        ('{"model_type": ["bert"]}', "model_type is ['bert']; BertBlocks reads"),
        ('{"hidden_sise": 3}', "did you mean 'hidden_size'?"),
        ('{"num_attention_heads": 7}', "num_attention_heads is 7; it must divide hidden_size = 768"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "bert", "is_decoder": true}', "is_decoder is True"),
        ('{"model_type": "modernbert", "layer_types": ["strange"]}', "is not a valid modernbert config"),
    ],
)
@pytest.mark.parametrize("command", ["describe", "compare"])
def test_a_bad_file_gives_one_sentence_that_names_it(tmp_path: Path, content: Any, message: Any, command: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    result = run(command, *(["mini"] if command == "compare" else []), tmp_path, expect=1)
    assert result.stdout == ""
    assert result.stderr.startswith("bertblocks: ")
    assert result.stderr.count("\n") == 1
    assert str(path) in result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "modernbert-bas",
            "'modernbert-bas' is not a preset (did you mean 'modernbert-base'?); choose one of bert-base",
        ),
        ("nowhere/at/all", "nowhere/at/all does not exist; give a preset"),
        ("missing.json", "missing.json does not exist; give a preset"),
        (".", "config.json does not exist."),
    ],
)
def test_unknown_names_and_missing_paths_give_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, message: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("describe", name, expect=1)
    assert result.stdout == ""
    assert result.stderr.startswith(f"bertblocks: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["describe"],
        ["describe", "mini", "--task", "translation"],
        ["describe", "mini", "--length", "0"],
        ["describe", "mini", "--json", "--mermaid"],
        ["compare", "mini"],
        ["draw", "mini"],
    ],
)
def test_wrong_usage_exits_with_code_2(arguments: Any) -> None:
    assert run(*arguments, expect=2).stdout == ""


# ---------------------------------------------------------------------- example


def test_the_minilm_example_agrees_with_transformers_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(EXAMPLES / "minilm.py"))
    torch.set_flush_denormal(False)  # what the example sets holds for the whole process
    assert ending.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Within 1e-05: yes" in lines
    ranked = [line.split("│")[2].strip() for line in lines if line.startswith("│ 0.") or line.startswith("│ -0.")]
    assert len(ranked) == 7
    assert {
        "Refunds are paid to your card within five days.",
        "You can return any item and receive what you paid.",
    } == set(ranked[:2])
