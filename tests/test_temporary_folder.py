"""Folders for temporary files are removed once they are unused, also when their maker was killed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forking import Child
from torchestra.system.temporary_folder import temporary_folder

PREFIX = "torchestra-tried-"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


def use(start: int, until: int) -> None:
    with temporary_folder(PREFIX) as folder:
        Path(folder, "file").touch()
        os.write(start, b"\n")
        os.read(until, 1)


def test_a_folder_is_removed_by_the_next_start_when_its_maker_was_killed_and_not_before() -> None:
    told, start = os.pipe()
    until, end = os.pipe()
    child = Child(lambda: use(start, until))
    try:
        os.read(told, 1)
        (folder,) = Path(tempfile.gettempdir()).iterdir()
        with temporary_folder(PREFIX) as other:
            assert {str(folder), other} == set(map(str, folder.parent.iterdir()))
    finally:
        child.kill()
        for each in (told, start, until, end):
            os.close(each)
    assert list(folder.iterdir()) == [folder / "file"]
    with temporary_folder(PREFIX) as other:
        assert list(folder.parent.iterdir()) == [Path(other)]


def test_a_folder_that_others_remove_before_it_is_locked_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, made = tempfile.mkdtemp, []

    def make_and_lose(prefix: str) -> str:
        made.append(make(prefix=prefix))
        if len(made) == 1:
            with temporary_folder(PREFIX):
                pass
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with temporary_folder(PREFIX) as folder:
        assert made[0] != folder
        assert os.path.isdir(folder)
        assert not os.path.exists(made[0])


def test_what_is_not_such_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    with temporary_folder(PREFIX) as folder:
        assert len(list(tmp_path.iterdir())) == 4
        assert os.stat(folder).st_mode & 0o777 == 0o700
    (tmp_path / f"{PREFIX}file").unlink()
    (tmp_path / f"{PREFIX}link").unlink()
    (tmp_path / "elsewhere").rmdir()
