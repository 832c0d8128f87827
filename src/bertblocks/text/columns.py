"""Which column of a table is what: as the caller says, else by well-known names, else by what the cells look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bertblocks.core.registry import nearest
from bertblocks.text.tables import KNOWN_NAMES, DataError, Records, is_number


def choose_columns(
    records: Records, needed: Sequence[str], optional: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Maps roles to columns of `records`; a role in `given` is taken as said, and left out if that is empty.

    Example:
        >>> records = Records("a.csv", ["sentence1", "sentence2", "score"], [{}], [2])
        >>> choose_columns(records, ["text", "label"], ["text_pair"], {})
        {'text': 'sentence1', 'label': 'score', 'text_pair': 'sentence2'}
    """
    chosen: dict[str, str] = {}
    optional = [role for role in optional if given.get(role) != ""]
    for role, column in given.items():
        if column and column not in records.columns:
            raise DataError(
                f"{records.source}: there is no column {column!r} for {role}; the columns are "
                f"{', '.join(records.columns)}{nearest(column, records.columns)}."
            )
        if column:
            chosen[role] = column
    free = [column for column in records.columns if column not in chosen.values()]
    for role in (*needed, *optional):
        named = [name for name in KNOWN_NAMES[role] if name in free]
        if role not in chosen and named:
            chosen[role] = named[0]
            free.remove(named[0])
    missing = [role for role in needed if role not in chosen]
    if missing:
        _guess(records, missing, optional, chosen, free)
    lacking = [role for role in needed if role not in chosen]
    if lacking:
        raise DataError(
            f"{records.source}: no column looks like {lacking[0]}; the columns are {', '.join(records.columns)}: "
            f"say which with {lacking[0]}=COLUMN."
        )
    return chosen


def _guess(
    records: Records, missing: list[str], optional: Sequence[str], chosen: dict[str, str], free: list[str]
) -> None:
    """Varied strings are texts; of the rest, numbers or few values are labels.

    Without a header texts are taken in order. With one, the text is the longest, and optional ones go by name alone.
    """
    sample = records.rows[:1000]

    def is_text(column: str) -> bool:
        cells = [row[column] for row in sample]
        if not all(isinstance(cell, str) for cell in cells) or all(is_number(cell) for cell in cells):
            return False
        return len(set(cells)) > len(cells) / 2 or any(" " in cell.strip() for cell in cells)

    texts = [column for column in free if is_text(column)]
    others = [column for column in free if column not in texts]
    if records.has_header:
        texts.sort(key=lambda column: -sum(len(row[column]) for row in sample))
        optional = [role for role in optional if role == "label"]
    for role in ("text", "text_pair", "negative"):
        if texts and role not in chosen and (role in missing or role in optional):
            chosen[role] = texts.pop(0)
    if "label" not in chosen and "label" in (*missing, *optional) and len(others) == 1:
        chosen["label"] = others[0]


def write_columns(chosen: Mapping[str, str], records: Records) -> str:
    """What was chosen, for the screen."""
    header = "" if records.has_header else " (no header)"
    return ", ".join(f"{role}={column}" for role, column in chosen.items()) + header
