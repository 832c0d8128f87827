"""Which parts of a model a checkpoint may lack."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedModel

#: Parts of task models. The checkpoint of another task may lack any of them as a whole, or have ones that are not used.
HEAD_PARTS = {
    "pooler",
    "head",
    "classifier_head",
    "decoder",
    "logit_scale",
    "classifier",
    "tagger",
    "spans",
    "order",
    "detector_head",
    "detector",
    "embedding_head",
    "sparse_head",
}


def find_fresh_heads(model: PreTrainedModel, missing: Collection[str]) -> tuple[list[str], list[str]]:
    """Splits the tensors that a checkpoint lacks into heads to initialize and tensors that the model cannot do without.

    A head starts fresh if all of its own tensors are missing; tied tensors belong to the encoder. Returns the names of
    such heads (`decoder`, `model.pooler`) and the missing tensors of the encoder and of incomplete heads.
    """
    own = set(model.state_dict()) - set(model.all_tied_weights_keys)
    fresh: set[str] = set()
    required = []
    for name in missing:
        head = _head_of(name, model)
        if head is not None and all(other in missing for other in own if _head_of(other, model) == head):
            fresh.add(head)
        else:
            required.append(name)
    return sorted(fresh), required


def is_head_tensor(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor of a checkpoint belongs to a head of some task, not necessarily to one of `model`.

    An encoder does not need heads, so it accepts those that BertBlocks does not know, too.
    """
    if _head_of(name, model) is not None:
        return True
    encoder_parts = {model.base_model_prefix, *(part for part, _ in model.base_model.named_children())}
    return model is model.base_model and name.split(".")[0] not in encoder_parts


def _head_of(name: str, model: PreTrainedModel) -> str | None:
    prefix = f"{model.base_model_prefix}." if name.startswith(f"{model.base_model_prefix}.") else ""
    part = name.removeprefix(prefix).split(".")[0]
    return prefix + part if part in HEAD_PARTS else None
