"""A run folder keeps one run and the settings it began with."""

from pathlib import Path

import pytest

from bertblocks.training.run_folder import RunFolder, RunFolderError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{bad", r"request\.json is not valid JSON: .*; choose another folder\.$"),
        ("[1]", r"request\.json holds a list, not a JSON object; choose another folder\.$"),
    ],
)
def test_damaged_request_file_raises_with_its_name_and_the_remedy(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "request.json").write_text(content)
    with pytest.raises(RunFolderError, match=message):
        RunFolder(tmp_path, "request.json", {"seed": 1}).check()


def test_a_folder_with_foreign_files_raises(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=r"holds thesis\.tex, which does not belong to a run"):
        RunFolder(tmp_path, "request.json", {"seed": 1}).claim()
