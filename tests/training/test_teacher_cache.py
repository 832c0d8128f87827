"""The cache of a teacher's outputs: nothing is computed twice, and nothing damaged is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bertblocks.training.distillation import teacher_cache
from bertblocks.training.distillation.teacher_cache import TeacherCache, hash_teacher
from tests.helpers import expect_log

TEXTS = [f"text {number}" for number in range(10)]


class Teacher:
    """Counts the texts that it is asked for, and fails after some of them."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.seen: list[str] = []
        self.fails_after = fails_after

    def __call__(self, texts: list[str]) -> Iterator[np.ndarray]:
        for text in texts:
            if len(self.seen) == self.fails_after:
                raise KeyboardInterrupt
            self.seen.append(text)
            yield expected(text)


def expected(text: str) -> np.ndarray:
    number = int(text.split()[1])
    return np.array([number, number**2], dtype=np.float16)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "PART_SIZE", 4)


def check(found: object, texts: list[str]) -> None:
    assert np.array_equal(np.array(found.tolist()), np.stack([expected(text) for text in texts]))  # type: ignore[attr-defined]


def test_only_new_texts_are_computed_and_each_once(tmp_path: Path) -> None:
    first, second = Teacher(), Teacher()
    asked = [*TEXTS[3:], TEXTS[5], TEXTS[3]]
    check(TeacherCache(tmp_path).get(asked, first), asked)
    assert first.seen == TEXTS[3:]
    cache = TeacherCache(tmp_path)
    check(cache.get(TEXTS, second), TEXTS)
    assert second.seen == TEXTS[:3]
    assert (cache.found, cache.computed) == (7, 3)


def test_an_interrupted_computation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        TeacherCache(tmp_path).get(TEXTS, Teacher(fails_after=9))
    rest = Teacher()
    check(TeacherCache(tmp_path).get(TEXTS, rest), TEXTS)
    assert rest.seen == TEXTS[8:]  # two parts of four were complete


@pytest.mark.parametrize("damage", ["bit", "end", "other file"])
def test_a_damaged_part_is_computed_again(tmp_path: Path, damage: str) -> None:
    TeacherCache(tmp_path).get(TEXTS, Teacher())
    path = sorted(tmp_path.glob("part-*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-1] ^= 1
    path.write_bytes({"bit": content, "end": content[:-3], "other file": b"{}"}[damage])
    again = Teacher()
    with expect_log(f"{path.name} is damaged"):
        check(TeacherCache(tmp_path).get(TEXTS, again), TEXTS)
    assert len(again.seen) in (2, 4)
    check(TeacherCache(tmp_path).get(TEXTS, Teacher(fails_after=0)), TEXTS)


def test_any_change_of_the_teacher_changes_its_key(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"mode": "mean"}')
    keys = [hash_teacher(tmp_path, "embeddings", 256), hash_teacher(tmp_path, "scores", 256)]
    (tmp_path / "1_Pooling" / "config.json").write_text('{"mode": "cls"}')
    keys.append(hash_teacher(tmp_path, "embeddings", 256))
    (tmp_path / "README.md").write_text("A card does not change what a model computes.")
    assert len(set(keys)) == 3
    assert hash_teacher(tmp_path, "embeddings", 256) == keys[-1]
