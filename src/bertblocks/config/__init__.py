"""One config for every encoder: keys, defaults, aliases, validation and presets."""

from bertblocks.config.config import BertBlocksConfig
from bertblocks.config.presets import preset_names
from bertblocks.config.validation import ConfigError

__all__ = ["BertBlocksConfig", "ConfigError", "preset_names"]
