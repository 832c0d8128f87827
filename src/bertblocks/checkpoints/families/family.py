"""A checkpoint family as data: a config map and key rules, each of which works in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import SIZES, ConfigError, own_keys
from bertblocks.core.messages import short_repr, shorten

#: Keys that have the same name in BertBlocks and in every family of transformers.
COMMON_KEYS = {
    key: key
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "tie_word_embeddings",
    )
}
#: Keys of a task head's labels, which are copied unchanged.
LABEL_KEYS = ("id2label", "label2id", "problem_type")

#: Keys that affect how a model runs or trains, not what it computes. A family need not represent them.
RUNTIME_KEYS = {
    "family",
    "attention_backend",
    "kernel_backend",
    "unpad",
    "init_kind",
    "initializer_range",
    "embedding_initializer_range",
    "initializer_cutoff_factor",
    "diffusion_min_time",
    "mask_token_id",
    "cls_token_id",
    "sep_token_id",
    # layer_types holds the same information
    "global_attention_every_n_layers",
    # an option of the base class
    "pooler",
}


@dataclass(frozen=True)
class Rule:
    """Maps one of our modules or parameters to one of theirs, or to several of theirs whose rows ours concatenates.

    `{i}` stands for the number of the layer. The rule of a module covers all of its parameters.
    """

    ours: str
    theirs: tuple[str, ...]
    #: The number of rows in each of theirs; equal shares by default.
    sizes: Callable[[BertBlocksConfig], list[int]] | None = None
    #: For each of our rows, the index of theirs.
    row_order: Callable[[BertBlocksConfig], Tensor] | None = None
    #: The configs whose checkpoints are written by this rule, if a family has several layouts. Reading tries all rules.
    when: Callable[[BertBlocksConfig], bool] | None = None
    #: Whether theirs have one more dimension, of size 1, at the end.
    is_column: bool = False
    #: The number of groups of a block-diagonal matrix, which theirs store as `[groups, in, out]` if it is more than 1.
    groups: Callable[[BertBlocksConfig], int] | None = None

    def read(self, tensors: list[Tensor], config: BertBlocksConfig) -> Tensor:
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        if self.is_column and tensor.dim() > 1 and tensor.shape[-1] == 1:
            tensor = tensor.squeeze(-1)
        if self.groups is not None and tensor.dim() == 3:
            tensor = tensor.transpose(1, 2).flatten(0, 1)
        order = None if self.row_order is None else self.row_order(config)
        # the loader reports a tensor of the wrong size
        return tensor if order is None or len(order) != len(tensor) else tensor[order]

    def write(self, tensor: Tensor, config: BertBlocksConfig) -> list[Tensor]:
        if self.row_order is not None:
            tensor = tensor[self.row_order(config).argsort()]
        tensor = tensor.unsqueeze(-1) if self.is_column else tensor
        if self.groups is not None and self.groups(config) > 1 and tensor.dim() == 2:
            tensor = tensor.unflatten(0, (self.groups(config), -1)).transpose(1, 2)
        parts = tensor.split(self.sizes(config)) if self.sizes is not None else tensor.chunk(len(self.theirs))
        return [part.contiguous() for part in parts]

    def is_for(self, config: BertBlocksConfig) -> bool:
        return self.when is None or self.when(config)

    def for_layer(self, index: int) -> Rule:
        theirs = tuple(name.format(i=index) for name in self.theirs)
        return replace(self, ours=self.ours.format(i=index), theirs=theirs)


def rule(
    ours: str,
    *theirs: str,
    sizes: Callable[[BertBlocksConfig], list[int]] | None = None,
    row_order: Callable[[BertBlocksConfig], Tensor] | None = None,
    when: Callable[[BertBlocksConfig], bool] | None = None,
    is_column: bool = False,
    groups: Callable[[BertBlocksConfig], int] | None = None,
) -> Rule:
    return Rule(ours, theirs, sizes, row_order, when, is_column, groups)


def qkv_sizes(config: BertBlocksConfig) -> list[int]:
    """The numbers of rows of queries, keys and values in our fused projection."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [queries, keys, keys]


@dataclass(frozen=True)
class Family:
    """A checkpoint family: how its configs and tensors map to BertBlocks and back."""

    #: The `model_type` in config.json, or a name of ours if authors use that of another family.
    name: str
    #: The name of its config class in transformers, or a class of ours if transformers has none.
    config_class: str | type[PreTrainedConfig]
    #: The model class of each task, in transformers or in the family's own code.
    model_classes: dict[str, str]
    #: The name of the encoder in task models.
    prefix: str
    #: Our keys and theirs, in addition to COMMON_KEYS or in place of them; None if they have no such key.
    keys: dict[str, str | None]
    #: Our keys that have the same value in every model of this family.
    fixed: dict[str, Any]
    #: Their keys and the only value of each that BertBlocks can represent.
    required: dict[str, Any]
    encoder_rules: tuple[Rule, ...]
    #: The rules for each task's head.
    head_rules: dict[str, tuple[Rule, ...]]
    #: Our keys from their config, and their keys from ours, where renaming is not enough.
    read_rest: Callable[[Any], dict[str, Any]]
    write_rest: Callable[[BertBlocksConfig], dict[str, Any]]
    #: Recognizes a config.json of this family that has the `model_type` of another.
    matches: Callable[[dict[str, Any]], bool] | None = None
    #: Their tensors without adapters, one of which may be merged, given their config and the adapter's name.
    merge_adapter: Callable[[dict[str, Tensor], Any, str | None], dict[str, Tensor]] | None = None
    #: Prepares their config values for parsing; the tensors are None if there is no checkpoint.
    prepare: Callable[[dict[str, Any], dict[str, Tensor] | None], dict[str, Any]] | None = None
    #: Our keys from those of their tensors that hold settings instead of weights, and those tensors from our config.
    read_buffers: Callable[[dict[str, Tensor], BertBlocksConfig], dict[str, Any]] | None = None
    write_buffers: Callable[[BertBlocksConfig, torch.dtype], dict[str, Tensor]] | None = None
    #: The names of the encoder in the models of some tasks, if they differ.
    prefixes: dict[str, str] = field(default_factory=dict)
    #: Other classes whose checkpoints contain a task's weights.
    aliases: dict[str, str] = field(default_factory=dict)
    #: The option of their base class that turns the pooler on or off.
    pooler_option: str | None = None
    #: Regular expressions for tensors that are not needed.
    ignored: tuple[str, ...] = ()
    #: Regular expressions for tensors that say nothing which config and weights do not say.
    derived: tuple[str, ...] = ()
    #: Regular expressions for old tensor names, and their replacements.
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def in_transformers(self) -> bool:
        return isinstance(self.config_class, str)

    def opens(self, task: str) -> bool:
        """Whether transformers has a class for a task of this family."""
        return self.in_transformers and hasattr(transformers, self.model_classes[task])

    # ------------------------------------------------------------------ config

    def read_config(self, theirs: PreTrainedConfig) -> BertBlocksConfig:
        if isinstance(self.config_class, type) and not isinstance(theirs, self.config_class):
            # the config class of remote code
            theirs = self.parse_config(theirs.to_dict())
        for key, value in self.required.items():
            if getattr(theirs, key, value) != value:
                raise ConfigError(
                    f"{key} is {getattr(theirs, key)!r} in this {self.name} config; BertBlocks supports {value!r} only."
                )
        options = {ours: getattr(theirs, name) for ours, name in self._all_keys().items()}
        labels = {key: getattr(theirs, key) for key in LABEL_KEYS}
        options = {**options, **self.fixed, **self.read_rest(theirs), **labels, "family": self.name}
        # a family may have values for blocks that this checkpoint does not use
        unused = BertBlocksConfig.unused_keys(options)
        return BertBlocksConfig(**{key: value for key, value in options.items() if key not in unused})

    def write_config(self, ours: BertBlocksConfig) -> PreTrainedConfig:
        options = {name: getattr(ours, key) for key, name in self._all_keys().items()}
        labels = {key: getattr(ours, key) for key in LABEL_KEYS}
        theirs = self.parse_config({**options, **self.required, **self.write_rest(ours), **labels})
        # the family cannot represent a value that a round trip changes
        again = self.read_config(theirs)
        blocks = {**ours.block_keys(), **again.block_keys()}
        runtime = {*RUNTIME_KEYS, *(name for name, key in blocks.items() if key.runtime)}
        for key in (*own_keys(BertBlocksConfig), *blocks):
            if key not in runtime and getattr(again, key) != getattr(ours, key):
                raise ConfigError(
                    f"{key} is {getattr(ours, key)!r}; a {self.name} checkpoint has {getattr(again, key)!r} "
                    "and cannot represent other values."
                )
        return theirs

    def parse_config(self, values: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> PreTrainedConfig:
        """The config object of transformers, which fills in defaults and understands old spellings."""
        self._check_counts(values)
        if self.prepare is not None:
            values = self.prepare(values, tensors)
        try:
            if isinstance(self.config_class, type):
                return self.config_class.from_dict(values)
            return getattr(transformers, self.config_class).from_dict(values)
        except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"This is not a valid {self.name} config: {_config_problem(error)}.") from error

    def _check_counts(self, values: dict[str, Any]) -> None:
        """Raises for numbers of layers and labels that transformers would make long lists of."""
        for ours in ("num_hidden_layers", "num_labels"):
            for name in {ours, self._all_keys().get(ours, ours)}:
                count, most = values.get(name), SIZES[ours][1]
                if isinstance(count, (int, float)) and count > most:
                    raise ConfigError(f"{name} is {short_repr(count)}; it must be at most {most:,}.")

    def make_model(self, config: PreTrainedConfig, task: str, has_pooler: bool) -> PreTrainedModel:
        """A transformers model whose weights are still to be set."""
        if not self.opens(task):
            what = f"{self.name} models" if not self.in_transformers else f"class for {task} in the {self.name} family"
            raise ConfigError(f"transformers has no {what}; save_huggingface writes a checkpoint folder.")
        model_class = getattr(transformers, self.model_classes[task])
        if task == "base" and self.pooler_option is not None:
            return model_class(config, **{self.pooler_option: has_pooler})
        return model_class(config)

    def _all_keys(self) -> dict[str, str]:
        return {ours: name for ours, name in {**COMMON_KEYS, **self.keys}.items() if name is not None}

    def support(self) -> dict[str, Any]:
        """The tasks that can be read and written, for `bertblocks families`."""
        return {"tasks": list(self.model_classes), "opens_in_transformers": self.in_transformers}

    def task_of(self, architecture: str) -> str | None:
        tasks = {name: task for task, name in self.model_classes.items()}
        return tasks.get(architecture) or self.aliases.get(architecture)

    # ------------------------------------------------------------------ weights

    def rules(self, config: BertBlocksConfig, task: str) -> Iterator[tuple[Rule, bool]]:
        """The rules of a task, repeated for every layer, and whether each belongs to the encoder."""
        for encoder_rule in self.encoder_rules:
            layers = range(config.num_hidden_layers) if "{i}" in encoder_rule.ours else range(1)
            for i in layers:
                yield encoder_rule.for_layer(i), True
        for head_rule in self.head_rules[task]:
            yield head_rule, False

    def read_weights(
        self, theirs: dict[str, Tensor], expected: list[str], config: BertBlocksConfig, task: str
    ) -> tuple[dict[str, Tensor], dict[str, str], set[str]]:
        """Our tensors among `expected`, the missing ones and their source's name, and the unused tensors of theirs."""
        theirs = {self._plain_name(name): tensor for name, tensor in theirs.items()}
        ours: dict[str, Tensor] = {}
        missing = dict.fromkeys(expected, "a rule")
        used: set[str] = set()
        prefix = "" if task == "base" else "model."
        for rule, in_encoder in self.rules(config, task):
            stem = prefix + rule.ours if in_encoder else rule.ours
            for name in expected:
                if name != stem and not name.startswith(stem + "."):
                    continue
                sources = [source + name[len(stem) :] for source in rule.theirs]
                if lacking := [source for source in sources if source not in theirs]:
                    if rule.is_for(config):
                        missing[name] = lacking[0]
                else:
                    _check_stackable({source: theirs[source] for source in sources})
                    ours[name] = rule.read([theirs[source] for source in sources], config)
                    used.update(sources)
        return ours, {name: source for name, source in missing.items() if name not in ours}, set(theirs) - used

    def sources_of(self, name: str, config: BertBlocksConfig, task: str) -> set[str]:
        """The names of the tensors of theirs that one of ours in a task's head comes from."""
        return {
            source + name[len(rule.ours) :]
            for rule, in_encoder in self.rules(config, task)
            if not in_encoder and (name == rule.ours or name.startswith(rule.ours + "."))
            for source in rule.theirs
        }

    def write_weights(self, ours: dict[str, Tensor], config: BertBlocksConfig, task: str) -> dict[str, Tensor]:
        """Converts all of our tensors to theirs."""
        theirs: dict[str, Tensor] = {}
        used: set[str] = set()
        prefix = self.prefixes.get(task, self.prefix)
        for rule, in_encoder in self.rules(config, task):
            nested = in_encoder and task != "base"
            stem = f"model.{rule.ours}" if nested else rule.ours
            for name, tensor in ours.items():
                if not rule.is_for(config) or (name != stem and not name.startswith(stem + ".")):
                    continue
                targets = [f"{prefix}.{target}" if nested else target for target in rule.theirs]
                for target, part in zip(targets, rule.write(tensor, config), strict=True):
                    theirs[target + name[len(stem) :]] = part
                used.add(name)
        if left := sorted(set(ours) - used):
            raise ConfigError(f"{left[0]} has no place in a {self.name} checkpoint ({len(left)} such tensors in all).")
        return theirs

    def read_options(self, theirs: dict[str, Tensor], config: BertBlocksConfig) -> dict[str, Any]:
        """The keys of ours that their tensors determine."""
        if self.read_buffers is None:
            return {}
        return self.read_buffers({self._plain_name(name): tensor for name, tensor in theirs.items()}, config)

    def extra_tensors(self, config: BertBlocksConfig, dtype: torch.dtype, task: str) -> dict[str, Tensor]:
        """The tensors of theirs that follow from our config."""
        tensors = {} if self.write_buffers is None else self.write_buffers(config, dtype)
        return tensors if task == "base" else {f"{self.prefix}.{name}": tensor for name, tensor in tensors.items()}

    def _plain_name(self, name: str) -> str:
        """A tensor name of theirs in its newest spelling, without the prefix of the encoder."""
        for old, new in self.renamed.items():
            name = re.sub(old, new, name)
        for prefix in (self.prefix, *self.prefixes.values()):
            name = name.removeprefix(prefix + ".")
        return name

    def check_unused(self, names: set[str], label: str, task: str) -> None:
        """Raises an error for a tensor of theirs that is neither used, nor part of another task's head, nor ignored.

        The task base does not need heads, so heads that no task knows are ignored as well.
        """
        encoder_parts = {stem.split(".")[0] for rule in self.encoder_rules for stem in rule.theirs}
        heads = [stem for rules in self.head_rules.values() for rule in rules for stem in rule.theirs]
        for name in sorted(names):
            is_head = any(name == stem or name.startswith(stem + ".") for stem in heads)
            is_head = is_head or (task == "base" and name.split(".")[0] not in encoder_parts)
            if not is_head and not any(re.search(pattern, name) for pattern in (*self.ignored, *self.derived)):
                raise ValueError(f"{label}: {name!r} has no place in a {self.name} model with this config.")


def _config_problem(error: Exception) -> str:
    """What transformers says about a config, without the names of its Python classes."""
    text = " ".join(str(error).split()).partition(" Errors: ")[0].rstrip(".")
    text = re.sub(r"^Validation error for field '\w+': \w+: ", "", text)
    return shorten(re.sub(r"<class '(?:NoneType|([\w.]+))'>", lambda match: match[1] or "null", text))


def _check_stackable(parts: dict[str, Tensor]) -> None:
    """Raises an error unless tensors to be concatenated have equal shapes except for their rows."""
    shapes = [tensor.shape[1:] for tensor in parts.values()]
    for (name, tensor), shape in zip(parts.items(), shapes, strict=True):
        if shapes.count(shape) <= len(shapes) // 2:
            others = next(other for other in parts if other != name)
            raise ValueError(f"{name} has shape {list(tensor.shape)} and {others} {list(parts[others].shape)}.")


def check_absolute_positions(theirs: Any) -> None:
    """Raises an error for relative positions, which transformers 4 had and transformers 5 silently ignores."""
    kind = getattr(theirs, "position_embedding_type", "absolute")
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type is {kind!r} in this {theirs.model_type} config; BertBlocks supports "
            "'absolute' only."
        )
