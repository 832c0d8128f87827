"""Which column of a table has which role: as the caller says, else by well-known names, else by content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bertblocks.core.registry import nearest
from bertblocks.text.headers import KNOWN_NAMES, is_number
from bertblocks.text.records import DataError, find_key
from bertblocks.text.tables import Records


def choose_columns(
    records: Records, needed: Sequence[str], optional: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Maps roles to columns of `records`. A role in `given` has that column, and none if it is empty.

    Names are compared without regard to case. `a.b` names key `b` of the objects in column `a`.

    Example:
        >>> records = Records("a.csv", ["Sentence1", "sentence2", "score"], [{}], [2])
        >>> choose_columns(records, ["text", "label"], ["text_pair"], {})
        {'text': 'Sentence1', 'label': 'score', 'text_pair': 'sentence2'}
    """
    optional = [role for role in optional if given.get(role) != ""]
    chosen = {role: _find_column(records, role, name) for role, name in given.items() if name}
    free = [column for column in records.columns if column not in chosen.values()]
    for role in (*needed, *optional):
        known = [column for name in KNOWN_NAMES[role] if (column := find_key(name, free)) is not None]
        if role not in chosen and known:
            chosen[role] = known[0]
            free.remove(known[0])
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


def _find_column(records: Records, role: str, name: str) -> str:
    column = find_key(name, records.columns)
    if column is not None:
        return column
    if "." in name and records.add_nested(name):
        return name
    raise DataError(
        f"{records.source}: there is no column {name!r} for {role}; the columns are "
        f"{', '.join(records.columns)}{nearest(name, records.columns)}."
    )


def _guess(
    records: Records, missing: list[str], optional: Sequence[str], chosen: dict[str, str], free: list[str]
) -> None:
    """Takes varied strings for texts and, of the other columns, numbers or few values for labels.

    Without a header the texts are taken in order. With one, the text is the longest, and only names choose optional
    columns.
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
    in_order = () if records.has_header else ("query", "document")
    for role in (*in_order, "text", "text_pair", "negative"):
        if texts and role not in chosen and (role in missing or role in optional):
            chosen[role] = texts.pop(0)
    if "label" not in chosen and "label" in (*missing, *optional) and len(others) == 1:
        chosen["label"] = others[0]


def write_columns(chosen: Mapping[str, str], records: Records) -> str:
    """The choice, for the screen."""
    details = [*([] if records.has_header else ["no header"]), *([records.details] if records.details else [])]
    note = f" ({', '.join(details)})" if details else ""
    return ", ".join(f"{role}={column}" for role, column in chosen.items()) + note
