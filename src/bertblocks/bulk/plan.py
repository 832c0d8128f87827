"""What a job will do, from its settings and the first rows of its input, without loading the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from bertblocks.bulk.manifest import describe_inputs
from bertblocks.bulk.settings import BulkSettings, check_options
from bertblocks.core.registry import nearest
from bertblocks.core.requirements import require_packages
from bertblocks.text.files import find_sources
from bertblocks.text.inputs import SAMPLE_RECORDS, InputRecord, read_rows
from bertblocks.text.records import DataError, find_key
from bertblocks.text.table_files import common_types


@dataclass(frozen=True)
class Plan:
    """The settings with absolute places and checked options, and all that the workers of a job have in common."""

    settings: BulkSettings
    sources: list[str]
    #: The columns to keep, with their Arrow types.
    keys: dict[str, Any]
    manifest: dict[str, Any]
    notes: list[str]


def make_plan(settings: BulkSettings) -> Plan:
    """Reads the first rows, and hashes the model and the input."""
    require_packages(["pyarrow"], "bertblocks bulk")
    from bertblocks.checkpoints.files import checkpoint_digest, find_checkpoint
    from bertblocks.inference.hardware import choose_device, choose_dtype, choose_threads, choose_token_budget

    options = check_options(settings.task, settings.options)
    sources = find_sources(settings.inputs)
    notes: list[str] = []
    rows = read_rows(sources, settings.bulk_task.roles, settings.columns, settings.read, notes=notes)
    sample = [row for row in islice(rows, SAMPLE_RECORDS) if isinstance(row, InputRecord)]
    checkpoint = find_checkpoint(settings.model)
    import torch

    device = torch.device(settings.device or choose_device())
    dtype = settings.dtype or str(choose_dtype(device)).removeprefix("torch.")
    settings = replace(settings, options=options, model=str(checkpoint.resolve()), device=str(device))
    if not settings.int8:
        settings = replace(settings, dtype=dtype)
    keys = _choose_keys(settings, sample)
    manifest = {
        "task": settings.task,
        "model": {"source": settings.model, "sha256": checkpoint_digest(checkpoint)},
        "options": {name: _to_json(value) for name, value in options.items()},
        "too_long": settings.too_long,
        "numbers": "int8" if settings.int8 else dtype,
        "device": device.type,
        "output_format": settings.format,
        "rows_per_shard": settings.rows_per_shard,
        "window": settings.window,
        "batch_tokens": choose_token_budget(device, settings.threads or choose_threads()),
        "columns": dict(settings.columns),
        "read": asdict(settings.read),
        "keys": {name: str(kind) for name, kind in keys.items()},
        "inputs": describe_inputs(sources),
    }
    return Plan(settings, sources, keys, manifest, notes)


def _to_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _choose_keys(settings: BulkSettings, sample: Sequence[InputRecord]) -> dict[str, Any]:
    """The columns to keep, with the types that their values have in the first rows."""
    import pyarrow as pa

    types = common_types([row.columns for row in sample], {}, {})
    if settings.keys is not None:
        chosen = [_find(name, list(types), settings.inputs) for name in settings.keys]
    else:
        texts = {name for row in sample for name, value in row.columns.items() if _is_part(value, row.value)}
        chosen = [name for name in types if name not in texts]
    return {name: pa.string() if types[name] == pa.null() else types[name] for name in chosen}


def _find(name: str, columns: list[str], inputs: Sequence[str]) -> str:
    found = find_key(name, columns)
    if found is None:
        raise DataError(
            f"{', '.join(map(str, inputs))}: there is no column {name!r} to keep; the columns are "
            f"{', '.join(columns)}{nearest(name, columns)}."
        )
    return found


def _is_part(value: Any, texts: Any) -> bool:
    return value is texts or (isinstance(texts, tuple) and any(value is text for text in texts))
