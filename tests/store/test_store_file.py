"""FileStore across processes, killed writers, damaged files, and the end of the file."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forking import Child
from torchestra.errors import DistStoreError, InvalidArgumentError, StoreTimeoutError
from torchestra.store import FileStore, sharedfile
from torchestra.store.filelog import MAGIC, Kind, encode
from torchestra.system import file_changes


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_processes_share_it(path: Path) -> None:
    store = FileStore(path, 5)
    children = [Child(lambda: [FileStore(path, 5).add("n", 1) for _ in range(50)]) for _ in range(4)]
    seen = [number for child in children for number in child.result()]
    assert sorted(seen) == list(range(1, 201))
    assert store.get("n") == b"200"


def test_a_get_in_one_process_waits_for_the_set_in_another(path: Path) -> None:
    store = FileStore(path)
    child = Child(lambda: FileStore(path).get("question"))
    store.set("question", "answer")
    assert child.result() == b"answer"


def test_a_wait_ends_with_the_change_and_not_with_the_next_look(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a change it would look again after a minute, and its time-out has passed by then."""
    if not sees_changes(path):
        pytest.skip("the system tells of no changes here: no inotify, or no more for this user")
    for name in ("_SEEING_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(sharedfile, name, 60.0)
    child = Child(lambda: FileStore(path).await_values(["question"], 30.0))
    store = FileStore(path)
    for number in range(5):
        store.set(f"something else {number}", "")
    store.set("question", "answer")
    assert child.result() == [b"answer"]


def test_a_wait_looks_by_itself_where_changes_are_not_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system tells nobody what other hosts change."""
    monkeypatch.setattr(file_changes, "_watch", lambda path: None)
    assert not sees_changes(path)
    child = Child(lambda: FileStore(path).get("question"))
    FileStore(path).set("question", "answer")
    assert child.result() == b"answer"


def sees_changes(path: Path) -> bool:
    path.touch(0o600)
    with file_changes.FileChanges(str(path)) as changes:
        return changes.are_seen


def test_a_wait_does_not_end_later_as_the_kernel_takes_long_to_close_what_it_watched(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch(0o600)
    close, by, closed = os.close, [], threading.Event()

    def note(descriptor: int) -> None:
        if "inotify" in os.readlink(f"/proc/self/fd/{descriptor}"):
            by.append(threading.current_thread())
            closed.set()
        close(descriptor)

    monkeypatch.setattr(os, "close", note)
    with file_changes.FileChanges(str(path)) as changes:
        if not changes.are_seen:
            pytest.skip("this system has no inotify, or this user none left")
    assert closed.wait(20.0), "nobody has closed it"
    assert threading.current_thread() not in by


def test_what_others_write_does_not_wake_a_wait_each_time(path: Path) -> None:
    """Else n ranks that meet would look n times n times."""
    store = FileStore(path)
    looks = 0
    for _ in store._file.changes(0.3):
        looks += 1
        store.set("something else", "")
    assert 2 < looks < 60, f"{looks} looks in 0.3 s, each after a change"


def test_a_forked_child_may_go_on_with_its_parents_store(path: Path) -> None:
    """A lock inherited over a fork is shared with the parent and would exclude nobody."""
    store = FileStore(path, 1)
    child = Child(lambda: [store.add("n", 1) for _ in range(100)])
    mine = [store.add("n", 1) for _ in range(100)]
    assert sorted(mine + child.result()) == list(range(1, 201))


@pytest.mark.parametrize("values", [b"", b"v" * 40])
def test_a_record_torn_at_any_byte_is_cut_off(path: Path, values: bytes) -> None:
    """What a writer leaves that is killed in the midst of a write."""
    writer, reader = FileStore(path), FileStore(path)
    writer.set("before", "1")
    whole = encode(Kind.SET, "torn", values)
    for cut in range(1, len(whole)):
        with path.open("ab") as file:
            file.write(whole[:cut])
        assert reader.get("before") == b"1"
        assert not reader.check(["torn"])
        writer.add("after", 1)
        assert reader.get("after") == str(cut).encode()
    assert FileStore(path).get("after") == str(len(whole) - 1).encode()


def test_a_torn_beginning_is_written_anew(path: Path) -> None:
    for start in (MAGIC[:3], MAGIC, MAGIC + b"num"):
        path.write_bytes(start)
        FileStore(path).set("k", "1")
        assert FileStore(path).get("k") == b"1"


def test_a_writer_killed_at_any_moment_harms_nobody(path: Path) -> None:
    store = FileStore(path)
    store.set("mine", "1")

    def write_forever() -> None:
        own = FileStore(path)
        own.set("ready", "1")
        while True:
            own.set("large", os.urandom(1 << 18))
            own.delete_key("large")

    for _ in range(10):
        child = Child(write_forever)
        store.wait(["ready"], 30)
        for _ in range(random.randrange(5)):
            store.add("n", 1)
        child.kill()
        store.delete_key("ready")
        store.set("large", "whole")
        assert FileStore(path).multi_get(["mine", "large"]) == [b"1", b"whole"]


@pytest.mark.parametrize("place", ["head", "key", "value"])
def test_damage_is_told_from_a_torn_end(path: Path, place: str) -> None:
    """Were a damaged length believed, all records after it would be cut off as torn."""
    store = FileStore(path)
    store.set("key", "value")
    position = {"head": -20, "key": -8, "value": -1}[place]
    record = bytearray(path.read_bytes())
    record[position] ^= 0x40
    path.write_bytes(bytes(record) + encode(Kind.SET, "good", b"1"))
    with pytest.raises(DistStoreError, match=r"is damaged at byte \d+: something else"):
        FileStore(path)


@pytest.mark.parametrize(
    ("prepare", "error", "words"),
    [
        (lambda path: path.write_text("precious notes"), DistStoreError, "is not a FileStore's .*precious"),
        (lambda path: path.mkdir(), InvalidArgumentError, "cannot open .*: Is a directory"),
        (lambda path: path.parent.rmdir(), InvalidArgumentError, "cannot open .*: No such file or directory"),
    ],
    ids=["another file", "a directory", "no directory"],
)
def test_an_unusable_path_is_refused(
    tmp_path: Path, prepare: Callable[[Path], object], error: type[Exception], words: str
) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "store"
    prepare(path)
    with pytest.raises(error, match=words):
        FileStore(path, 2)
    if path.is_file():
        assert path.read_text() == "precious notes"


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(path: Path) -> None:
    path.touch(mode=0)
    with pytest.raises(InvalidArgumentError, match="Permission denied; it must be a file that every rank"):
        FileStore(path)


def test_a_path_must_be_one() -> None:
    with pytest.raises(
        InvalidArgumentError, match="FileStore: `file_name` must be a str or a PathLike, got 3"
    ):
        FileStore(3)  # type: ignore[arg-type]


def test_the_last_of_all_users_deletes_the_file(path: Path) -> None:
    first = FileStore(path, 3)
    Child(lambda: FileStore(path, 3).close()).result()
    third = FileStore(path, 3)
    third.set("k", "1")
    first.close()
    assert third.get("k") == b"1"
    del third
    gc.collect()
    assert not path.exists()


def test_the_file_stays_until_all_users_have_come(path: Path) -> None:
    FileStore(path, 2).close()
    assert path.exists()
    FileStore(path, 2).close()
    assert not path.exists()


def test_the_file_stays_where_the_number_of_users_is_open(path: Path) -> None:
    FileStore(path).set("k", "1")
    gc.collect()
    assert FileStore(path).get("k") == b"1"


def test_a_clone_keeps_the_file(path: Path) -> None:
    twin = FileStore(path, 1).clone()
    gc.collect()
    twin.set("k", "1")
    assert twin.get("k") == b"1"
    del twin
    gc.collect()
    assert not path.exists()


def killed_user(path: Path) -> None:
    def use() -> None:
        store = FileStore(path, 2)
        store.set("stale", "1")
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(use)
    with pytest.raises(AssertionError, match="killed"):
        child.result()


def test_the_file_of_a_killed_job_is_begun_anew(path: Path) -> None:
    killed_user(path)
    assert path.exists()
    store = FileStore(path, 2)
    assert store.list_keys() == []


def test_a_killed_user_does_not_take_the_keys_of_the_living(path: Path) -> None:
    alive = FileStore(path, 3)
    killed_user(path)
    assert FileStore(path, 3).get("stale") == b"1"
    alive.close()


def test_a_killed_user_counts_as_gone(path: Path) -> None:
    alive = FileStore(path, 2)
    killed_user(path)
    alive.close()
    assert not path.exists()


def test_the_file_is_the_users_own(path: Path) -> None:
    store = FileStore(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.path == str(path)


def test_a_file_that_others_could_read_is_closed_to_them(path: Path) -> None:
    path.touch(mode=0o644)
    FileStore(path).set("k", "1")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666])
def test_a_file_that_others_may_write_to_is_refused(path: Path, mode: int) -> None:
    """They could tell this job's ranks anything. Also when it becomes so while it is used."""
    path.touch()
    path.chmod(mode)
    words = (
        rf"does not use {path}: other users may write to it \(its mode is {mode:o}\); delete it .*chmod 600"
    )
    with pytest.raises(InvalidArgumentError, match=words):
        FileStore(path)
    path.chmod(0o600)
    store = FileStore(path)
    path.chmod(mode)
    with pytest.raises(InvalidArgumentError, match=words):
        store.get("k")
    path.chmod(0o600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    path.touch(mode=0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(
        InvalidArgumentError, match=r"belongs to another user \(number 65534\).* name a new file"
    ):
        FileStore(path)
    assert path.read_bytes() == b""


def test_a_symbolic_link_is_not_followed(path: Path) -> None:
    """In a directory like /tmp somebody else may have laid it, to have a file of this user written to."""
    target = path.with_name("target")
    path.symlink_to(target)
    with pytest.raises(InvalidArgumentError, match="it is a symbolic link"):
        FileStore(path)
    assert not target.exists()


def test_a_pipe_is_refused(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(InvalidArgumentError, match="it is not a regular file"):
        FileStore(path)


def test_keys_lead_nowhere_in_the_file_system(path: Path) -> None:
    before = sorted(path.parent.iterdir())
    store = FileStore(path)
    keys = ["../escaped", "/etc/torchestra-escaped", "a/../../b", "..", "k\n", "%2e%2e/x"]
    for key in keys:
        store.set(key, "1")
    assert sorted(FileStore(path).list_keys()) == sorted(keys)
    assert sorted(path.parent.iterdir()) == [*before, path]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from(
        [b"", MAGIC, MAGIC + b"number00", MAGIC + b"number00" + encode(Kind.SET, "k", b"1")]
    ),
    records=st.lists(
        st.builds(encode, st.sampled_from([*Kind, 0, 99]), st.sampled_from(["k", "", "x" * 9]), st.binary()),
        max_size=3,
    ),
    rest=st.binary(max_size=40),
)
def test_whatever_is_in_the_file_is_used_or_refused(
    path: Path, start: bytes, records: list[bytes], rest: bytes
) -> None:
    path.write_bytes(start + b"".join(records) + rest)
    with contextlib.suppress(DistStoreError):
        store = FileStore(path, 2)
        assert store.add("number", 1) == 1
        store.close()
    path.unlink(missing_ok=True)


def test_a_closed_store_says_so(path: Path) -> None:
    store = FileStore(path, 1)
    store.close()
    store.close()
    with pytest.raises(DistStoreError, match="is closed; make a new one"):
        store.set("k", "1")


def test_a_deleted_file_is_noticed(path: Path) -> None:
    store = FileStore(path)
    path.unlink()
    with pytest.raises(DistStoreError, match="was deleted while in use"):
        store.set("k", "1")


def test_a_file_deleted_and_made_anew_is_read_from_its_start(path: Path) -> None:
    store = FileStore(path)
    store.set("old", "1")
    path.unlink()
    FileStore(path).set("new", "1")
    assert store.list_keys() == ["new"]


def test_a_lock_that_is_never_given_back_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(path)
    monkeypatch.setattr(sharedfile, "_LOCK_SECONDS", 0.02)
    with path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(DistStoreError, match=r"was locked by another process for 0\.02 s"):
            store.set("k", "1")
    store.set("k", "1")


def test_a_full_disk_is_an_error_and_leaves_the_file_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(path)
    store.set("k", "1")
    size = path.stat().st_size
    write = os.pwrite

    def half(descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) > 10:
            return write(descriptor, data[:10], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(DistStoreError, match=r"cannot write to .*: No space left"):
        store.set("large", "v" * 1000)
    monkeypatch.undo()
    assert path.stat().st_size == size
    assert store.list_keys() == ["k"]


def test_a_time_out_names_the_file(path: Path) -> None:
    with pytest.raises(
        StoreTimeoutError, match=f"after 10ms, keys: 'k' did not come to FileStore\\({path}\\)"
    ):
        FileStore(path).wait(["k"], 0.01)
