"""A checkpoint family as data: a config map and key rules, each read in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from bertblocks.checks import ConfigError, own_keys
from bertblocks.config import BertBlocksConfig

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
    # the next two matter to models that have such a head, and are part of its rules there
    "pooler",
    "classifier_head_dropout",
}


@dataclass(frozen=True)
class Rule:
    """One of our modules or parameters, and the one of theirs, or the several of theirs whose rows it stacks.

    `{i}` stands for the layer. A module's rule holds for all of its parameters.
    """

    ours: str
    theirs: tuple[str, ...]

    def read(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def write(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(len(self.theirs)))


def rule(ours: str, *theirs: str) -> Rule:
    return Rule(ours, theirs)


@dataclass(frozen=True)
class Family:
    """How one family of checkpoints maps to BertBlocks and back."""

    #: `model_type` in its config.json.
    name: str
    config_class: str
    #: The class in transformers for each task.
    model_classes: dict[str, str]
    #: What task models call their encoder.
    prefix: str
    #: Our key -> theirs, beside the common ones.
    keys: dict[str, str]
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
    #: Names of other classes whose checkpoints hold a task's weights and more.
    aliases: dict[str, str] = field(default_factory=dict)
    #: Tensors that hold nothing to read, as regular expressions.
    ignored: tuple[str, ...] = ()
    #: Old names of tensors: regular expression -> replacement.
    renamed: dict[str, str] = field(default_factory=dict)

    # ------------------------------------------------------------------ config

    def read_config(self, theirs: PreTrainedConfig) -> BertBlocksConfig:
        for key, value in self.required.items():
            if getattr(theirs, key, value) != value:
                raise ConfigError(
                    f"{key} is {getattr(theirs, key)!r} in this {self.name} config; BertBlocks can hold {value!r} only."
                )
        options = {ours: getattr(theirs, name) for ours, name in {**COMMON_KEYS, **self.keys}.items()}
        labels = {key: getattr(theirs, key) for key in LABEL_KEYS}
        return BertBlocksConfig(**options, **self.fixed, **self.read_rest(theirs), **labels)

    def write_config(self, ours: BertBlocksConfig) -> PreTrainedConfig:
        options = {name: getattr(ours, key) for key, name in {**COMMON_KEYS, **self.keys}.items()}
        labels = {key: getattr(ours, key) for key in LABEL_KEYS}
        config_class = getattr(transformers, self.config_class)
        theirs = config_class(**options, **self.required, **self.write_rest(ours), **labels)
        # what does not come back cannot be held
        again = self.read_config(theirs)
        for key in own_keys(BertBlocksConfig):
            if key not in RUNTIME_KEYS and getattr(again, key) != getattr(ours, key):
                raise ConfigError(
                    f"{key} is {getattr(ours, key)!r}; a {self.name} checkpoint has {getattr(again, key)!r} there "
                    "and cannot hold it."
                )
        return theirs

    def task_of(self, architecture: str) -> str | None:
        tasks = {name: task for task, name in self.model_classes.items()}
        return tasks.get(architecture) or self.aliases.get(architecture)

    # ------------------------------------------------------------------ weights

    def rules(self, config: BertBlocksConfig, task: str) -> Iterator[tuple[Rule, bool]]:
        """The rules of a task, one by one for every layer, and whether each is of the encoder."""
        for one in self.encoder_rules:
            layers = range(config.num_hidden_layers) if "{i}" in one.ours else range(1)
            for i in layers:
                yield Rule(one.ours.format(i=i), tuple(name.format(i=i) for name in one.theirs)), True
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
                    missing[name] = lacking[0]
                else:
                    ours[name] = one.read([theirs[source] for source in sources])
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
                if name != stem and not name.startswith(stem + "."):
                    continue
                targets = [f"{self.prefix}.{target}" if nested else target for target in one.theirs]
                for target, part in zip(targets, one.write(tensor), strict=True):
                    theirs[target + name[len(stem) :]] = part
                used.add(name)
        if left := sorted(set(ours) - used):
            raise ConfigError(f"{left[0]} has no place in a {self.name} checkpoint ({len(left)} such tensors in all).")
        return theirs

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
