"""What a command's NAME_OR_PATH stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


@dataclass(frozen=True)
class Source:
    """A config, what the user called it, and what it is in a few words."""

    name: str
    description: str
    config: BertBlocksConfig


def fail(message: object) -> NoReturn:
    """Ends the command with one sentence on stderr and exit code 1."""
    typer.echo(f"bertblocks: {' '.join(str(message).split())}", err=True)
    raise typer.Exit(1)


def load_source(name_or_path: str) -> Source:
    """The config that a preset's name, a folder or a file stands for; ends the command if there is none.

    A preset's name comes first; `./name` is a folder of the same name.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return _find_source(name_or_path)
    except (OSError, ValueError) as error:
        fail(error)


def _find_source(name_or_path: str) -> Source:
    from bertblocks.config import BertBlocksConfig
    from bertblocks.families.files import read_json
    from bertblocks.presets import preset_names, read_preset

    path = Path(name_or_path)
    if name_or_path not in preset_names():
        if path.exists():
            file = path / "config.json" if path.is_dir() else path
            description, config = _read_config(file, read_json(file))
            return Source(name_or_path, description, config)
        if path.name != name_or_path or path.suffix == ".json":
            raise FileNotFoundError(
                f"{name_or_path} does not exist; give a preset, a folder with a config.json, or a .json file."
            )
    description = read_preset(name_or_path)["description"]
    return Source(name_or_path, description, BertBlocksConfig.from_preset(name_or_path))


def _read_config(file: Path, values: dict[str, Any]) -> tuple[str, BertBlocksConfig]:
    """What a config file holds, in words and as a config. A file without `model_type` holds BertBlocks' own keys."""
    import transformers

    from bertblocks.config import BertBlocksConfig
    from bertblocks.families import FAMILIES
    from bertblocks.registry import nearest

    own = BertBlocksConfig.model_type
    family = values.get("model_type", own)
    if family not in (own, *FAMILIES):
        readable = ", ".join((own, *FAMILIES))
        fail(f"{file}: model_type is {family!r}; BertBlocks reads {readable}{nearest(family, FAMILIES)}.")
    try:
        if family == own:
            return "a BertBlocks config", BertBlocksConfig.from_dict(values)
        theirs = getattr(transformers, FAMILIES[family].config_class).from_dict(values)
        return f"a config of transformers' {family} family", BertBlocksConfig.from_huggingface(theirs)
    except Exception as error:  # a config class may raise anything at values that it does not expect
        fail(f"{file} is no valid {family} config: {error}")
