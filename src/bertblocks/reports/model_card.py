"""README.md next to a saved model: the card that the Hugging Face Hub shows, with metadata that it understands.

A card that someone wrote or changed is never replaced: BertBlocks knows its own by a checksum in their last line.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertblocks.core.storage import atomic_file, read_json

CARD = "README.md"
_OWN = re.compile(r"\n<!-- Written by BertBlocks \(([0-9a-f]{16})\)\. A card that was changed is kept\. -->\n\Z")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
#: Metadata of a source that is also true of a model made from it.
INHERITED = ("license", "license_name", "license_link", "language", "datasets", "base_model", "tags")
#: By the end of the class in config.json: the Hub's task, and code that uses the model, which is called `predictor`.
USES = {
    "ForSequenceClassification": ("text-classification", 'predictor.classify(["A sentence to classify."])'),
    "ForTokenClassification": ("token-classification", 'predictor.tag(["Anna lives in Oslo."])'),
    "ForQuestionAnswering": (
        "question-answering",
        'predictor.answer([("Where does Anna live?", "Anna lives in Oslo.")])',
    ),
    "ForMaskedLM": ("fill-mask", 'predictor.fill_mask([f"Anna lives in {predictor.tokenizer.mask_token}."])'),
}
#: The same, by what sentence-transformers calls the kind of a model.
KINDS: dict[str | None, tuple[str, str]] = {
    "CrossEncoder": (
        "text-ranking",
        'predictor.rerank("Where does Anna live?", ["Anna lives in Oslo.", "It rains."])',
    ),
    "SparseEncoder": ("feature-extraction", 'predictor.encode_sparse(["A sentence to encode."])[0].indices'),
    "MultiVectorEncoder": (
        "feature-extraction",
        'predictor.encode_multi(["A sentence to encode."], role="query")[0].shape',
    ),
}
EMBED = ("feature-extraction", 'predictor.encode(["A sentence to embed."]).shape')


@dataclass(frozen=True)
class Card:
    """What a card says about a model, apart from what its folder shows."""

    name: str
    #: What the model is, in one paragraph.
    summary: str
    #: The folder or hub id that the model was made from, if any, and how: finetune, quantized or merge.
    sources: Sequence[str | Path] = ()
    relation: str | None = None
    #: Names of files, corpora or datasets, and the datasets among them that are on the Hub.
    data: Sequence[str] = ()
    datasets: Sequence[str] = ()
    #: Scores by metric, and the name of the data that they were measured on.
    scores: Mapping[str, float] = field(default_factory=dict)
    scored_on: str = ""
    #: What a user should know before relying on the model.
    limitations: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def write_card(folder: Path, card: Card, target: Path | None = None) -> None:
    """Writes the card of the model in `folder`, unless someone wrote one there.

    If `folder` is about to replace the folder `target`, a card that someone wrote in `target` is copied.
    """
    if is_written_by_user(folder / CARD):
        return
    if target is not None and is_written_by_user(target / CARD):
        text = (target / CARD).read_bytes()
    else:
        text = _sign(_front_matter(folder, card) + _body(folder, card)).encode()
    with atomic_file(folder / CARD) as file:
        file.write(text)


def is_written_by_user(path: Path) -> bool:
    """Whether a card exists that BertBlocks did not write, or that was changed since.

    Example:
        >>> is_written_by_user(Path("a-folder-without-a-card/README.md"))
        False
    """
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    own = _OWN.search(text)
    return own is None or _checksum(text[: own.start()]) != own[1]


def _sign(text: str) -> str:
    return f"{text}\n<!-- Written by BertBlocks ({_checksum(text)}). A card that was changed is kept. -->\n"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------- metadata


def read_metadata(source: str | Path) -> dict[str, Any]:
    """The metadata of the card in a folder; empty if there is none, or if it cannot be read."""
    import yaml

    path = Path(source) / CARD
    if not path.is_file():
        return {}
    match = re.match(r"\A---\s*\n(.*?)\n---\s*\n", path.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        values = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def hub_id(source: str | Path) -> str | None:
    """The id of a source on the Hub: the source itself, or the repository of a folder in the Hub's cache.

    Example:
        >>> hub_id("google-bert/bert-base-uncased"), hub_id("models--a--b/snapshots/0123"), hub_id("./run")
        ('google-bert/bert-base-uncased', 'a/b', None)
    """
    cached = re.search(r"models--([^/]+)/snapshots/", f"{source}/")
    if cached:
        return cached[1].replace("--", "/")
    is_id = isinstance(source, str) and _HUB_ID.fullmatch(source) and not Path(source).exists()
    return str(source) if is_id else None


def _front_matter(folder: Path, card: Card) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    inherited: dict[str, Any] = {}
    for source in card.sources:
        inherited = {**{key: v for key, v in read_metadata(source).items() if key in INHERITED}, **inherited}
    ids = [name for source in card.sources if (name := hub_id(source))]
    task, _ = _use(folder)
    tags = ["bertblocks", *([card.relation] if card.relation == "merge" else []), *_as_list(inherited.pop("tags", []))]
    library = "sentence-transformers" if _is_embedder(folder) else "bertblocks" if _is_own(folder) else "transformers"
    base = ids or _as_list(inherited.pop("base_model", []))
    inherited.pop("base_model", None)
    if base and card.relation:
        inherited["base_model_relation"] = card.relation
    results = [
        EvalResult(
            task_type=task,
            dataset_type=card.scored_on,
            dataset_name=card.scored_on,
            metric_type=metric,
            metric_value=round(float(value), 6),
        )
        for metric, value in card.scores.items()
        if math.isfinite(value)
    ]
    values = {
        "license": "unknown",
        **inherited,
        "base_model": base or None,
        "library_name": library,
        "pipeline_tag": task,
        "tags": list(dict.fromkeys(map(str, tags))),
    }
    datasets = [name for name in card.datasets if _HUB_ID.fullmatch(name) and not Path(name).exists()]
    if datasets:
        values["datasets"] = datasets
    data = ModelCardData(
        **values,
        model_name=card.name,
        eval_results=results or None,
        metrics=list(card.scores) or None,
        ignore_metadata_errors=True,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else {}


def _is_own(folder: Path) -> bool:
    return _config(folder).get("model_type") == "bertblocks"


def _is_embedder(folder: Path) -> bool:
    return (folder / "modules.json").is_file() and _model_type(folder) != "CrossEncoder"


def _model_type(folder: Path) -> str | None:
    """What sentence-transformers calls the kind of a model."""
    path = folder / "config_sentence_transformers.json"
    return read_json(path).get("model_type") if path.is_file() else None


def _use(folder: Path) -> tuple[str, str]:
    """The Hub's name of the model's task, and code that does it."""
    config = _config(folder)
    name = next(iter(config.get("architectures") or []), "")
    if (kind := _model_type(folder)) in KINDS:
        return KINDS[kind]
    if _is_embedder(folder):
        return "sentence-similarity", EMBED[1]
    if config.get("causal"):
        return EMBED
    return next((use for ending, use in USES.items() if name.endswith(ending)), EMBED)


# ---------------------------------------------------------------------- text


def _body(folder: Path, card: Card) -> str:
    _, call = _use(folder)
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "spiece.model"))
    usage = f'from bertblocks import Predictor\n\npredictor = Predictor(".")  # this folder\nprint({call})'
    if not has_tokenizer:
        usage = 'from bertblocks import load\n\nmodel, _ = load(".")  # it has no tokenizer\nprint(model.config)'
    parts = [
        f"# {card.name}",
        card.summary,
        "## Usage",
        'Once the model is on the Hub, its id replaces `"."`.',
        f"```python\n{usage}\n```",
    ]
    if card.scores:
        rows = "\n".join(f"| {_cell(name)} | {value:.4f} |" for name, value in card.scores.items())
        parts += ["## Scores", f"Measured on {_cell(card.scored_on)}.", f"| metric | value |\n| --- | ---: |\n{rows}"]
    if card.data:
        parts += ["## Data", "\n".join(f"- {_cell(name)}" for name in card.data)]
    limits = [
        *card.limitations,
        "The model reflects its training data, including their errors and biases. It was not tested for other uses, "
        "domains or languages than those of its data.",
    ]
    parts += ["## Limitations", "\n".join(f"- {limit}" for limit in limits)]
    if card.settings:
        rows = "\n".join(f"| {_cell(key)} | {_cell(value)} |" for key, value in card.settings.items())
        parts += ["## Settings", f"| setting | value |\n| --- | --- |\n{rows}"]
    return "\n\n".join(parts) + "\n"


def _cell(value: Any) -> str:
    """A value as code in Markdown, which shows any text as it is."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    fence = "``" if "`" in text else "`"
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"
