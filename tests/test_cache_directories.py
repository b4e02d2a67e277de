"""A compiled kernel is code: it is read only from where nobody else can have put it, and never needed."""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torchestra.monitor import doctor
from torchestra.system import cache_directories
from torchestra.system.cache_directories import choose, distrust, prepare

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
ANOTHER = 4711


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of this user's below one of this user's."""
    (tmp_path / "parent").mkdir(mode=0o700)
    (tmp_path / "parent" / "folder").mkdir(mode=0o700)
    return tmp_path / "parent" / "folder"


def test_a_directory_of_ones_own_is_trusted(folder: Path) -> None:
    assert distrust(folder) == ""
    assert distrust(folder / ".." / "folder") == ""


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_can_write_is_not(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert "folder can be written by others" in distrust(folder)


def test_nor_one_that_others_can_replace(folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert "parent can be written by others" in distrust(folder)
    folder.parent.chmod(0o1777)  # as /tmp: nobody can rename what is not his own
    assert distrust(folder) == ""


@AS_ROOT
@pytest.mark.parametrize("which", ["folder", "parent"])
def test_nor_one_of_another_user(folder: Path, which: str) -> None:
    chosen = folder if which == "folder" else folder.parent
    os.chown(chosen, ANOTHER, ANOTHER)
    assert distrust(folder) == f"{chosen} belongs to user {ANOTHER}"


def test_links_are_followed_to_what_they_lead_through(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder.parent, target_is_directory=True)
    assert distrust(link / "folder") == ""
    folder.parent.chmod(0o777)
    assert "parent can be written by others" in distrust(link / "folder")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "link to itself" in distrust(loop)


@AS_ROOT
def test_a_link_of_another_user_is_not_followed(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    os.lchown(link, ANOTHER, ANOTHER)
    assert "is a link that belongs to user" in distrust(link)


def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert prepare(tmp_path / "one" / "two") == ""
    finally:
        os.umask(before)
    for made in (tmp_path / "one", tmp_path / "one" / "two"):
        assert made.stat().st_mode & 0o777 == 0o700


def test_nothing_is_made_where_it_could_not_be_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "can be written by others" in prepare(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    tmp_path.chmod(0o1777)
    assert not prepare(tmp_path / "folder")


def test_what_cannot_be_made_or_written_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert prepare(tmp_path / "file" / "folder").endswith("file is no directory")
    assert prepare(tmp_path / "file").endswith("is no directory")
    assert prepare(Path("/proc/no such")) != ""


def refusing(*wanted: str) -> Callable[[Path], str]:
    return lambda folder: (
        "Read-only file system" if any(str(folder).startswith(each) for each in wanted) else ""
    )


def test_a_user_without_a_home_has_a_directory_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arbitrary uid, in a container whose root is read-only."""

    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for variable in ("HOME", "XDG_CACHE_HOME", "TORCHESTRA_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cache_directories, "prepare", refusing(str(cache_directories._NATIVE)))
    directory, refused = choose()
    assert directory is not None
    assert directory.folder.parent == tmp_path / f"torchestra-cache-{os.geteuid()}"
    assert directory.why == "temporary files"
    assert refused == [f"{cache_directories._NATIVE}/__pycache__ (the installation): Read-only file system"]


def test_where_nothing_can_be_written_there_is_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_can_be_used() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_can_be_used)
    monkeypatch.setattr(cache_directories, "prepare", refusing("/"))
    directory, refused = choose()
    assert directory is None
    assert len(refused) >= 3


def test_the_doctor_tells_what_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TORCHESTRA_CACHE_DIR", str(tmp_path))
    finding = next(each for each in doctor.examine() if each.subject == "kernels")
    assert f"{tmp_path} can be written by others (mode 0777)" in finding.remark
    assert "compiled" in finding.found
