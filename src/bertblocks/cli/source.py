"""Finds the config that a command's NAME_OR_PATH stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from bertblocks.core.console import printable
from bertblocks.core.messages import shorten
from bertblocks.core.storage import why_unreadable

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


@dataclass(frozen=True)
class ConfigSource:
    """A config, the name that the user gave, and a short description."""

    name: str
    description: str
    config: BertBlocksConfig


def fail(message: object) -> NoReturn:
    """Ends the command with one sentence on stderr and exit code 1, or silently if the reader of a pipe has left."""
    if isinstance(message, BrokenPipeError):
        raise message
    if isinstance(message, OSError) and message.filename is not None:
        message = f"{message.filename}: {message.strerror}."
    typer.echo(printable(f"bertblocks: {shorten(' '.join(str(message).split()))}"), err=True)
    raise typer.Exit(1)


def load_source(name_or_path: str) -> ConfigSource:
    """Loads the config of a preset, a folder or a file; ends the command if there is none.

    Presets take precedence; write `./name` for a folder with the name of a preset.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return _find_source(name_or_path)
    except (OSError, ValueError) as error:
        fail(error)


def _find_source(name_or_path: str) -> ConfigSource:
    from bertblocks.config import BertBlocksConfig
    from bertblocks.config.presets import preset_names, read_preset

    path = Path(name_or_path)
    if name_or_path not in preset_names():
        if path.exists():
            return _read_source(name_or_path, path / "config.json" if path.is_dir() else path)
        if path.name != name_or_path or path.suffix == ".json" or path.is_symlink():
            raise FileNotFoundError(
                f"{name_or_path} {why_unreadable(path)}; give a preset, a folder with a config.json, or a .json or "
                ".yaml file."
            )
    description = read_preset(name_or_path)["description"]
    return ConfigSource(name_or_path, description, BertBlocksConfig.from_preset(name_or_path))


def _read_source(name: str, file: Path) -> ConfigSource:
    from bertblocks.checkpoints.families import read_config
    from bertblocks.checkpoints.families.neobert import read_yaml_config
    from bertblocks.core.storage import read_json

    if file.suffix in (".yaml", ".yml"):
        return ConfigSource(name, "a training file of NeoBERT", read_yaml_config(file))
    values = read_json(file)
    try:
        config = read_config(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    family = values.get("model_type", config.model_type)
    is_own = family == config.model_type
    return ConfigSource(name, "a BertBlocks config" if is_own else f"a config of the {family} family", config)
