"""Simulate programs that keep files on a disk that is full, fails, or forgets: subject "disks".

The programs are the product's own: ranks that write elastic checkpoints, users of a FileStore, and a
recording that takes the place of an older one. In each round something may go wrong with the disk (disk.py).
Checked:

* checkpoints: what cannot be written is told by an OSError; what was said to be written is read again after
  any fault, unless it was damaged itself, and then one before it, if more than one is kept; nothing is read
  as whole that is not; and where there is room for one checkpoint more than there are, it can be written,
  whatever has failed before (at the second attempt, if other ranks' shares may be left of what has failed);
* FileStore: a change that was made is seen by every user; one that was refused, by none; one whose writer
  died, as far as that had come;
* recordings: there is the old one or the new one, whole. (They are not flushed: a power failure may take
  both.)
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch

from torchestra.elastic import dcp
from torchestra.elastic.checkpoints import Checkpoints, Writer
from torchestra.engine.recorder import trace
from torchestra.errors import DistStoreError, QueueEmptyError
from torchestra.store import FileStore
from torchestra.store.sharedfile import SharedFile
from verification.simulation.disk import Died, Disk

_ROUNDS, _STORE_STEPS = 6, 60
_VALUES = 4000  # in a tensor: the checkpoint's smaller files are little beside it
_SLACK_BYTES = 4000


class _Training:
    """Ranks that write checkpoints of their steps, and begin again where the newest one is."""

    def __init__(self, disk: Disk, choices: random.Random) -> None:
        self._disk, self._choices = disk, choices
        self._ranks, self._keep = choices.choice((1, 2, 3)), choices.choice((1, 2, 3))
        self._folder = disk.root / "checkpoints"
        self._step = 0
        self._written: list[int] = []  # steps that were said to be written and not damaged since, newest last
        self._size = 0  # of a checkpoint
        self._excused = False  # the next one may find no room
        self._begin_again()

    def run(self) -> None:
        for _ in range(_ROUNDS):
            fault = self._choices.choice(("", "", "full", "full", "flush", "kill", "power", "damage"))
            if fault == "damage":
                self._damage()
            self._save(fault)

    def _begin_again(self) -> None:
        """Have new processes read the newest checkpoint."""
        self._all = [Checkpoints(self._folder, 1, self._keep) for _ in range(self._ranks)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged ones
            found = self._all[0].load()
        newest = self._written[-1] if self._written else 0
        step = 0 if found is None else found.state["step"]
        assert step >= newest, f"the checkpoint of step {newest} was written, and that of step {step} is read"
        if found is not None:
            values = [each for tensor in found.state["parts"].values() for each in set(tensor.tolist())]
            assert set(values) == {float(step)}, f"the checkpoint of step {step} has values of {values}"
        self._step = step

    def _save(self, fault: str) -> None:
        """Write a checkpoint of the next step, all ranks in turn; see that what is promised holds."""
        self._step += 1
        disk = self._disk
        if fault == "full":
            disk.room = disk.used() + self._choices.randint(0, max(1, self._size))
        elif self._size:
            disk.room = (len(list(self._folder.glob("step-*"))) + 1) * self._size + _SLACK_BYTES
        disk.fails_to_flush = fault == "flush"
        disk.dies_in = self._choices.randint(0, 25 * self._ranks) if fault in ("kill", "power") else None
        failed = self._write()
        disk.room, disk.fails_to_flush = 1 << 40, False
        is_excused, self._excused = self._excused, bool(failed) and self._ranks > 1
        if disk.is_dead or fault == "power":
            assert disk.is_dead or is_excused or not failed, repr(failed)
            if not failed:
                self._written = [*self._written, self._step][-self._keep :]
            disk.revive()
            if fault == "power":
                disk.lose_power()
            self._begin_again()
        elif failed is None:
            self._written = [*self._written, self._step][-self._keep :]
            self._size = self._size or disk.used()
        else:
            assert fault in ("full", "flush") or is_excused, (
                f"there was room, and the checkpoint failed: {failed!r}"
            )
            assert isinstance(failed, OSError), f"{type(failed).__name__} tells of the disk: {failed}"
            self._begin_again()

    def _write(self) -> BaseException | None:
        """Have all ranks write their shares; return what the first that failed has told."""
        parts = {str(each): torch.full((_VALUES,), float(self._step)) for each in range(self._ranks)}
        failed = None
        name = str(self._choices.random())
        with self._disk.mounted(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shares that do not come
            for rank in reversed(range(self._ranks)):
                each = self._all[rank]
                try:
                    each.save(self._step, parts, {}, Writer(rank, self._ranks, name))
                    if failed is not None:
                        each.abandon()  # as the rank that has failed leaves
                    each.wait()
                except BaseException as error:
                    failed = failed or error
        return failed

    def _damage(self) -> None:
        """Change a byte of the newest checkpoint."""
        if not self._written:
            return
        step = self._written.pop()
        folder = self._folder / f"step-{step:08}"
        assert folder.exists(), f"the checkpoint of step {step} was written, and is gone"
        files = sorted(folder.iterdir())
        path = self._choices.choice(files)
        content = bytearray(path.read_bytes())
        content[self._choices.randrange(len(content))] ^= 1
        path.write_bytes(content)
        self._disk.events.append(f"{path.name} of step {step} is damaged")
        self._begin_again()


class _Users:
    """Users of a FileStore, in turn; what it has is known, but for what the dead have left half done."""

    def __init__(self, disk: Disk, choices: random.Random) -> None:
        self._disk, self._choices = disk, choices
        self._path = disk.root / "store"
        self._known: dict[str, bytes] = {}
        self._queued: list[bytes] = []
        with disk.mounted():
            self._users = [FileStore(self._path) for _ in range(choices.choice((2, 3)))]

    def run(self) -> None:
        for number in range(_STORE_STEPS):
            index = self._choices.randrange(len(self._users))
            self._disk.room = 1 << 40
            fault = self._choices.choice(("", "", "full", "kill"))
            if fault == "full":
                self._disk.room = self._disk.used() + self._choices.randint(0, 300)
            elif fault == "kill":
                self._disk.dies_in = self._choices.randint(0, 2)
            before = dict(self._known), list(self._queued)
            states = self._act(self._users[index], number)
            try:
                with self._disk.mounted():
                    states.pop()()
            except DistStoreError as error:
                if "No space left" not in str(error):
                    raise
                self._known, self._queued = before
            except Died:
                self._replace(index)
                self._take_over([before, *states])
            else:
                self._known, self._queued = states[-1]
            self._disk.dies_in = None
            self._check()

    def _act(self, user: FileStore, number: int) -> list[Any]:
        """Return the states that something leads through, and the function that does it."""
        choices, value = self._choices, f"{number}".encode() * self._choices.choice((1, 30, 200))
        known, queued = self._known, self._queued
        key, other = choices.choice("abc"), choices.choice("de")
        what = choices.choice(("set", "set two", "append", "add", "delete", "push", "pop"))
        if what == "set":
            return [({**known, key: value}, queued), lambda: user.set(key, value)]
        if what == "set two":
            one = {**known, key: value}
            both = ({**one, other: value}, queued)
            return [(one, queued), both, lambda: user.multi_set([key, other], [value, value])]
        if what == "append":
            longer = {**known, key: known.get(key, b"") + value}
            return [(longer, queued), lambda: user.append(key, value)]
        if what == "add":
            total = {**known, "sum": str(int(known.get("sum", b"0")) + 1).encode()}
            return [(total, queued), lambda: user.add("sum", 1)]
        if what == "delete":
            less = {name: each for name, each in known.items() if name != key}
            return [(less, queued), lambda: user.delete_key(key)]
        if what == "push":
            return [(known, [*queued, value]), lambda: user.queue_push("queue", value)]
        return [(known, queued[1:]), functools.partial(self._pop, user)]

    def _pop(self, user: FileStore) -> None:
        with suppress(QueueEmptyError):
            value = user.queue_pop("queue", block=False)
            assert value == self._queued[0]

    def _replace(self, index: int) -> None:
        """Have a new process come in the place of one that died."""
        self._users[index]._file._closed = True  # the dead do not leave
        self._disk.revive()
        self._disk.room = 1 << 40
        with self._disk.mounted():
            self._users[index] = FileStore(self._path)

    def _seen_by(self, user: FileStore) -> tuple[dict[str, bytes], int]:
        keys = [each for each in user.list_keys() if each != "queue"]
        with self._disk.mounted():
            values = user.multi_get(keys) if keys else []
            return dict(zip(keys, values, strict=True)), user.queue_len("queue")

    def _take_over(self, states: Sequence[tuple[dict[str, bytes], list[bytes]]]) -> None:
        """See how far a user has come that has died."""
        seen = self._seen_by(self._users[0])
        for known, queued in states:
            if seen == (known, len(queued)):
                self._known, self._queued = known, queued
                return
        raise AssertionError(f"one died, and the store has {seen}, which is none of {states}")

    def _check(self) -> None:
        for user in self._users:
            seen = self._seen_by(user)
            expected = (self._known, len(self._queued))
            assert seen == expected, f"the store has {seen}, expected {expected}"

    def close(self) -> None:
        for each in self._users:
            each.close()


def _record(disk: Disk, choices: random.Random) -> None:
    """Write one recording in the place of another, again and again."""
    path, kept = disk.root / "trace.json", ""
    for number in range(_ROUNDS):
        fault = choices.choice(("", "full", "kill"))
        disk.room = disk.used() + choices.randint(0, 300) if fault == "full" else 1 << 40
        disk.dies_in = choices.randint(0, 3) if fault == "kill" else None
        told = {"traceEvents": [f"{number}"] * choices.choice((1, 40, 4000))}
        try:
            with disk.mounted():
                trace.write_trace(path, told)
            kept = path.read_text()
            assert f'"{number}"' in kept, "it says that it is written"
        except (OSError, Died):
            assert fault, "nothing was wrong"
            content = path.read_text() if path.exists() else ""
            assert content == kept, f"the older recording has become {content[:200]!r}"
        if not disk.is_dead:
            assert not list(disk.root.glob("*.new")), "a part of a recording is left"
        disk.revive()
        for each in disk.root.glob("*.new"):
            each.unlink()


def _train(disk: Disk, choices: random.Random) -> None:
    _Training(disk, choices).run()


def _share_a_store(disk: Disk, choices: random.Random) -> None:
    users = _Users(disk, choices)
    try:
        users.run()
    finally:
        users.close()


PROGRAMS: tuple[Callable[[Disk, random.Random], None], ...] = (_train, _train, _share_a_store, _record)


def run(seed: int) -> Disk:
    """Run what a seed says; raise an error if a promise was broken."""
    choices = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder).resolve(), choices)
        try:
            PROGRAMS[seed % len(PROGRAMS)](disk, choices)
        except Exception as error:
            error.add_note("\n".join(disk.events))
            raise
        return disk


def first_failure(seeds: Iterable[int]) -> tuple[int, Exception] | None:
    """Return the first of these seeds that breaks a promise, and which."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            return seed, error
    return None


# Ways to break the programs; the first three, and the fifth, are defects that there were


def _leave_what_has_failed(self: Checkpoints, present: Path) -> None:
    pass


def _keep_the_last_by_number(self: Checkpoints, step: int) -> None:
    for _, old in sorted(self._found(), reverse=True)[self.keep :]:
        shutil.rmtree(old, ignore_errors=True)


def _flush_directories_alone(path: Path) -> None:
    if path.is_dir():
        _bring_to_disk(path)


def _flush_files_alone(path: Path) -> None:
    if path.is_file():
        _bring_to_disk(path)


def _share_as_torch_tells(directory: Path, rank: int, values: dict[str, Any]) -> None:
    try:
        _write_share(directory, rank, values)
    except OSError as error:
        raise error.__cause__ or error from None


def _write_and_cut_nothing(self: SharedFile, descriptor: int, data: bytes, offset: int) -> None:
    with mock.patch.object(os, "ftruncate"):
        _write(self, descriptor, data, offset)


def _replay_and_cut_nothing(self: SharedFile, descriptor: int, *, writing: bool) -> None:
    with mock.patch.object(os, "ftruncate"):
        _replay(self, descriptor, writing=writing)


@contextmanager
def _in_place(path: str | Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    with open(path, "wb" if binary else "w") as file:
        yield file


_bring_to_disk, _write_share = dcp.bring_to_disk, dcp.write_share
_write, _replay = SharedFile._write, SharedFile._replay

HARMFUL: dict[str, tuple[int, object, str, object]] = {
    "leave what has failed": (4, Checkpoints, "_remove_unfinished", _leave_what_has_failed),
    "keep the last by number": (29, Checkpoints, "_remove_older", _keep_the_last_by_number),
    "flush directories alone": (1, dcp, "bring_to_disk", _flush_directories_alone),
    "flush files alone": (1, dcp, "bring_to_disk", _flush_files_alone),
    "tell what torch tells": (0, dcp, "write_share", _share_as_torch_tells),
    "cut nothing after an error": (50, SharedFile, "_write", _write_and_cut_nothing),
    "cut nothing that is torn": (14, SharedFile, "_replay", _replay_and_cut_nothing),
    "write in place": (3, trace, "replacing", _in_place),
}
"""The first seed that finds it, what is replaced where, and by what. (Sizes of files depend on their
names, so elsewhere it may be a later seed of the same program.)"""


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Break a program in the way that has this name."""
    _, place, attribute, replacement = HARMFUL[name]
    with mock.patch.object(place, attribute, replacement):
        yield
