"""A checkpoint family as data: a config map and key rules, each read in both directions."""

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
from bertblocks.config.validation import ConfigError, own_keys

#: Keys that every family of transformers has under the same name.
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
#: What a task head's labels are called; carried over unread.
LABEL_KEYS = ("id2label", "label2id", "problem_type")

#: Keys that say how a model runs or trains, not what it computes: no family needs to hold them.
RUNTIME_KEYS = {
    "family",
    "attention_backend",
    "kernel_backend",
    "unpad",
    "init_kind",
    "initializer_range",
    "initializer_cutoff_factor",
    "diffusion_min_time",
    "ngpt_renormalize",
    "mask_token_id",
    "cls_token_id",
    "sep_token_id",
    # what it says is in layer_types
    "global_attention_every_n_layers",
    # a matter of the base class alone, which takes it as an option
    "pooler",
}


@dataclass(frozen=True)
class Rule:
    """One of our modules or parameters, and the one of theirs, or the several of theirs whose rows it stacks.

    `{i}` stands for the layer. A module's rule holds for all of its parameters.
    """

    ours: str
    theirs: tuple[str, ...]
    #: How many rows come from each of several of theirs; equal shares if not given.
    sizes: Callable[[BertBlocksConfig], list[int]] | None = None
    #: For each of our rows, the number of theirs.
    rows: Callable[[BertBlocksConfig], Tensor] | None = None
    #: In a family of several layouts: the configs that this rule writes for. What is there is read under any of them.
    when: Callable[[BertBlocksConfig], bool] | None = None

    def read(self, tensors: list[Tensor], config: BertBlocksConfig) -> Tensor:
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        order = None if self.rows is None else self.rows(config)
        # a tensor of another size stays as it is, for the loader to name
        return tensor if order is None or len(order) != len(tensor) else tensor[order]

    def write(self, tensor: Tensor, config: BertBlocksConfig) -> list[Tensor]:
        if self.rows is not None:
            tensor = tensor[self.rows(config).argsort()]
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
    rows: Callable[[BertBlocksConfig], Tensor] | None = None,
    when: Callable[[BertBlocksConfig], bool] | None = None,
) -> Rule:
    return Rule(ours, theirs, sizes, rows, when)


def qkv_sizes(config: BertBlocksConfig) -> list[int]:
    """Rows of queries, keys and values in our fused projection."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [queries, keys, keys]


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints maps to BertBlocks and back."""

    #: `model_type` in its config.json.
    name: str
    #: Its name in transformers, or a class of ours for a family that transformers does not have.
    config_class: str | type[PreTrainedConfig]
    #: The class for each task, in transformers or in the family's own code.
    model_classes: dict[str, str]
    #: What task models call their encoder.
    prefix: str
    #: Our key -> theirs, beside or in place of the common ones; None: theirs has no such key.
    keys: dict[str, str | None]
    #: Our keys with the one value that this family has.
    fixed: dict[str, Any]
    #: Their keys with the only value that can be represented.
    required: dict[str, Any]
    encoder_rules: tuple[Rule, ...]
    #: Rules of each task's head.
    head_rules: dict[str, tuple[Rule, ...]]
    #: Our keys from their config, and theirs from ours, where a rename is not enough.
    read_rest: Callable[[Any], dict[str, Any]]
    write_rest: Callable[[BertBlocksConfig], dict[str, Any]]
    #: Their config values made ready to be parsed, with the tensors of the checkpoint if there is one.
    prepare: Callable[[dict[str, Any], dict[str, Tensor] | None], dict[str, Any]] | None = None
    #: Our keys from their tensors (under plain names) that no weight of ours is made of, and those tensors from ours.
    read_buffers: Callable[[dict[str, Tensor], BertBlocksConfig], dict[str, Any]] | None = None
    write_buffers: Callable[[BertBlocksConfig, torch.dtype], dict[str, Tensor]] | None = None
    #: Names of other classes whose checkpoints hold a task's weights and more.
    aliases: dict[str, str] = field(default_factory=dict)
    #: The option of its base class that leaves out the pooler.
    pooler_option: str | None = None
    #: Tensors that hold nothing to read, as regular expressions.
    ignored: tuple[str, ...] = ()
    #: Old names of tensors: regular expression -> replacement.
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def in_transformers(self) -> bool:
        return isinstance(self.config_class, str)

    # ------------------------------------------------------------------ config

    def read_config(self, theirs: PreTrainedConfig) -> BertBlocksConfig:
        if isinstance(self.config_class, type) and not isinstance(theirs, self.config_class):
            # the class of a model's own code
            theirs = self.parse_config(theirs.to_dict())
        for key, value in self.required.items():
            if getattr(theirs, key, value) != value:
                raise ConfigError(
                    f"{key} is {getattr(theirs, key)!r} in this {self.name} config; BertBlocks can hold {value!r} only."
                )
        options = {ours: getattr(theirs, name) for ours, name in self._all_keys().items()}
        labels = {key: getattr(theirs, key) for key in LABEL_KEYS}
        return BertBlocksConfig(**{**options, **self.fixed, **self.read_rest(theirs), **labels, "family": self.name})

    def write_config(self, ours: BertBlocksConfig) -> PreTrainedConfig:
        options = {name: getattr(ours, key) for key, name in self._all_keys().items()}
        labels = {key: getattr(ours, key) for key in LABEL_KEYS}
        theirs = self.parse_config({**options, **self.required, **self.write_rest(ours), **labels})
        # what does not come back cannot be held
        again = self.read_config(theirs)
        for key in own_keys(BertBlocksConfig):
            if key not in RUNTIME_KEYS and getattr(again, key) != getattr(ours, key):
                raise ConfigError(
                    f"{key} is {getattr(ours, key)!r}; a {self.name} checkpoint has {getattr(again, key)!r} there "
                    "and cannot hold it."
                )
        return theirs

    def parse_config(self, values: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> PreTrainedConfig:
        """transformers' config object, whose defaults and old spellings are transformers' own."""
        if self.prepare is not None:
            values = self.prepare(values, tensors)
        try:
            if isinstance(self.config_class, type):
                return self.config_class.from_dict(values)
            return getattr(transformers, self.config_class).from_dict(values)
        except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"This is no valid {self.name} config: {' '.join(str(error).split())}") from error

    def make_model(self, config: PreTrainedConfig, task: str, has_pooler: bool) -> PreTrainedModel:
        """An empty model of transformers."""
        if not self.in_transformers:
            raise ConfigError(f"transformers has no {self.name} models; save_huggingface writes a checkpoint folder.")
        model_class = getattr(transformers, self.model_classes[task])
        if task == "base" and self.pooler_option is not None:
            return model_class(config, **{self.pooler_option: has_pooler})
        return model_class(config)

    def _all_keys(self) -> dict[str, str]:
        return {ours: name for ours, name in {**COMMON_KEYS, **self.keys}.items() if name is not None}

    def support(self) -> dict[str, Any]:
        """What can be read and written, for people and programs to look up."""
        return {"tasks": list(self.model_classes), "opens_in_transformers": self.in_transformers}

    def task_of(self, architecture: str) -> str | None:
        tasks = {name: task for task, name in self.model_classes.items()}
        return tasks.get(architecture) or self.aliases.get(architecture)

    # ------------------------------------------------------------------ weights

    def rules(self, config: BertBlocksConfig, task: str) -> Iterator[tuple[Rule, bool]]:
        """The rules of a task, one by one for every layer, and whether each is of the encoder."""
        for one in self.encoder_rules:
            layers = range(config.num_hidden_layers) if "{i}" in one.ours else range(1)
            for i in layers:
                yield one.for_layer(i), True
        for one in self.head_rules[task]:
            yield one, False

    def read_weights(
        self, theirs: dict[str, Tensor], expected: list[str], config: BertBlocksConfig, task: str
    ) -> tuple[dict[str, Tensor], dict[str, str], set[str]]:
        """Our tensors under the names `expected`; those that theirs has no source for, with its name; theirs unused."""
        theirs = {self._plain_name(name): tensor for name, tensor in theirs.items()}
        ours: dict[str, Tensor] = {}
        missing = dict.fromkeys(expected, "a rule")
        used: set[str] = set()
        prefix = "" if task == "base" else "model."
        for one, in_encoder in self.rules(config, task):
            stem = prefix + one.ours if in_encoder else one.ours
            for name in expected:
                if name != stem and not name.startswith(stem + "."):
                    continue
                sources = [source + name[len(stem) :] for source in one.theirs]
                if lacking := [source for source in sources if source not in theirs]:
                    if one.is_for(config):
                        missing[name] = lacking[0]
                else:
                    _refuse_unlike({source: theirs[source] for source in sources})
                    ours[name] = one.read([theirs[source] for source in sources], config)
                    used.update(sources)
        return ours, {name: source for name, source in missing.items() if name not in ours}, set(theirs) - used

    def write_weights(self, ours: dict[str, Tensor], config: BertBlocksConfig, task: str) -> dict[str, Tensor]:
        """Their tensors from all of ours."""
        theirs: dict[str, Tensor] = {}
        used: set[str] = set()
        for one, in_encoder in self.rules(config, task):
            nested = in_encoder and task != "base"
            stem = f"model.{one.ours}" if nested else one.ours
            for name, tensor in ours.items():
                if not one.is_for(config) or (name != stem and not name.startswith(stem + ".")):
                    continue
                targets = [f"{self.prefix}.{target}" if nested else target for target in one.theirs]
                for target, part in zip(targets, one.write(tensor, config), strict=True):
                    theirs[target + name[len(stem) :]] = part
                used.add(name)
        if left := sorted(set(ours) - used):
            raise ConfigError(f"{left[0]} has no place in a {self.name} checkpoint ({len(left)} such tensors in all).")
        return theirs

    def read_options(self, theirs: dict[str, Tensor], config: BertBlocksConfig) -> dict[str, Any]:
        """Our keys that are to be read off their tensors."""
        if self.read_buffers is None:
            return {}
        return self.read_buffers({self._plain_name(name): tensor for name, tensor in theirs.items()}, config)

    def extra_tensors(self, config: BertBlocksConfig, dtype: torch.dtype, task: str) -> dict[str, Tensor]:
        """Their tensors that follow from our config."""
        tensors = {} if self.write_buffers is None else self.write_buffers(config, dtype)
        return tensors if task == "base" else {f"{self.prefix}.{name}": one for name, one in tensors.items()}

    def _plain_name(self, name: str) -> str:
        """Their name without the encoder's prefix, in its newest spelling."""
        for old, new in self.renamed.items():
            name = re.sub(old, new, name)
        return name.removeprefix(self.prefix + ".")

    def refuse_unused(self, names: set[str], label: str) -> None:
        """Tensors of theirs that went nowhere are an error, unless another task's head accounts for them."""
        heads = [stem for rules in self.head_rules.values() for one in rules for stem in one.theirs]
        for name in sorted(names):
            is_head = any(name == stem or name.startswith(stem + ".") for stem in heads)
            if not is_head and not any(re.search(pattern, name) for pattern in self.ignored):
                raise ValueError(f"{label}: {name!r} has no place in a {self.name} model with this config.")


def _refuse_unlike(parts: dict[str, Tensor]) -> None:
    """Tensors that are to be stacked must agree in all but their rows."""
    shapes = [tensor.shape[1:] for tensor in parts.values()]
    for (name, tensor), shape in zip(parts.items(), shapes, strict=True):
        if shapes.count(shape) <= len(shapes) // 2:
            others = next(other for other in parts if other != name)
            raise ValueError(f"{name} has shape {list(tensor.shape)} and {others} {list(parts[others].shape)}.")


def refuse_relative_positions(theirs: Any) -> None:
    """Configs of transformers 4 could ask for relative positions; its successor reads over that key."""
    kind = getattr(theirs, "position_embedding_type", "absolute")
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type is {kind!r} in this {theirs.model_type} config; BertBlocks can hold "
            "'absolute' only."
        )
