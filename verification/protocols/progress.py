"""The queue of asynchronous operations: a program that calls them and waits, and the thread that runs them.

The product's are engine/progress.py, communicator/work.py and the queued operation of communicator/queue.py,
with the kernels of the doorbell. A model stands for the operation, and for starting a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from torchestra.engine.kernels import doorbell
from torchestra.system.forking import forks_so_far
from verification.protocols import threads
from verification.protocols.product import Mutation, copies
from verification.protocols.replay import perform, resumed, turn
from verification.protocols.threads import THREADING, ModelList, ModelLock, ModelWords, Shared, in_order
from verification.protocols.world import Model, ProtocolWorld, Rules
from verification.violations import WrongResult

MODULES = ("progress", "torchestra.communicator.work", "torchestra.communicator.queue")
DONE = ("is done",)
_KERNELS = {
    name: in_order(getattr(doorbell, name), SHORT_SLEEPS=1)
    for name in ("ring", "start_now", "close", "await_task")
}
_DOORBELL = {name: value for name, value in vars(doorbell).items() if isinstance(value, int)}


class _Nobody(set[Any]):
    """Stands for the set of threads that are looked at when the interpreter ends."""

    def add(self, one: Any) -> None:
        """Do not add it."""


@dataclass(frozen=True)
class Progress:
    """Threads of a program that call operations and wait for them, and the queue's own thread.

    Attributes:
        name: for reports.
        programs: by thread, a letter for each thing that it does: ``s`` calls an operation, ``w`` waits for
            the oldest that it has called, ``t`` waits for it without running it, ``c`` closes the queue.
        rules: for other events.
    """

    name: str
    programs: tuple[str, ...]
    rules: Rules = field(default_factory=Rules)

    @property
    def size(self) -> int:
        """How many threads there are."""
        return len(self.programs) + 1

    def make(self, mutation: Mutation | None = None) -> Any:
        """Return the function that makes the first state."""
        made = _Classes(copies(MODULES, _REPLACED, mutation), self)
        programs = [lambda rank=rank: made.caller(rank) for rank in range(len(self.programs))]
        model = Model(
            [*programs, made.thread],
            SERVICES,
            self.check,
            {"sleepers": frozenset(), "ran": (), "running": -1, ("queue", "pending"): 0,
             ("queue", "_begun"): 0},
            self.rules,
            CHOICES,
            threads.AT_ONCE,
            {**threads.INTERRUPTED, "begins an operation": False, "ends an operation": False},
        )  # fmt: skip
        return lambda known: ProtocolWorld(model, known)

    def name_of(self, address: int) -> str:
        """Return the name of a word."""
        return f"word {address}"

    @staticmethod
    def _is_left(world: ProtocolWorld) -> bool:
        """Return whether an operation was queued and is not over."""
        return bool(world.facts.get("tasks"))

    def check(self, world: ProtocolWorld) -> None:
        """Refuse operations that are run twice, or never, or in another order than they were called."""
        if world.has_ended():
            called = sum(program.count("s") for program in self.programs)
            ran = len(world.facts["ran"])
            if ran != called and (not world.interrupts or ran > called or self._is_left(world)):
                raise WrongResult(f"of {called} operations these ran: {world.facts['ran']}")
            if world.facts["queue", "pending"] != 0:
                raise WrongResult(f"{world.facts['queue', 'pending']} are said to be pending")
            for rank, result in enumerate(world.results):
                if result != DONE:
                    raise WrongResult(f"thread {rank} ended with {result}")


class _Engine:
    rank = 0


class _Thread:
    """The queue's thread, for those that started it."""

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        perform("joins")

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return bool(perform("looks whether it runs"))


class _Classes:
    """The product's classes, whose objects' attributes are shared by the threads of a model."""

    name, engine = "model", _Engine

    def __init__(self, made: dict[str, ModuleType], case: Progress) -> None:
        progress, work, queue = (made[name] for name in MODULES)
        classes = self
        self._case, self._module = case, progress
        self._tasks: dict[Any, Any] = {}

        class Queue(progress.ProgressThread):  # type: ignore[name-defined, misc]
            name_in_model = "queue"
            _words, _address = ModelWords(), 0
            _lock, _turn = ModelLock("queue's lock"), ModelLock("turn", again=True)
            pending, _begun = Shared(at_once=True), Shared(at_once=True)

            def __init__(self) -> None:
                self._name, self._depth, self._state = "queue", [0], SimpleNamespace()
                self._tasks = _Tasks(classes)

            @property
            def _thread(self) -> _Thread | None:
                return _Thread() if perform("reads by itself", "queue", "thread") else None

            @_thread.setter
            def _thread(self, value: object) -> None:
                perform("writes by itself", "queue", "thread", value is not None)

            @property
            def _runner(self) -> Any:
                """The thread that has the turn, as far as the one that asks can be it."""
                return perform("reads by itself", "queue", "runner", perform("is"))

            @_runner.setter
            def _runner(self, value: int | None) -> None:
                perform("writes by itself", "queue", "runner", perform("is"), value)

        class Work(work.Work):  # type: ignore[name-defined, misc]
            _ended, helps = Shared(), Shared()
            _result, _exception, _source = Shared(at_once=True), Shared(at_once=True), Shared(at_once=True)
            _made_in, _future, held, _keeps_result = forks_so_far(), None, False, False
            _description = "an operation"

            def __init__(self, number: Any) -> None:
                self.name_in_model = ("work", *number)
                self._lock = ModelLock(("lock of work", *number))
                self._sleepers = _Sleepers(("sleepers of", *number))

            @property
            def progress(self) -> Any:
                return partial(Queue().progress, self.is_completed) if self.helps else None

            @progress.setter
            def progress(self, value: object) -> None:
                self.helps = value is not None

            @property
            def start(self) -> Any:
                return Queue().start_now if self.helps else None

            @start.setter
            def start(self, value: object) -> None:
                """Do nothing: the product sets both."""

        class Task(queue._Queued):  # type: ignore[name-defined, misc]
            ran, interrupt = Shared(at_once=True), Shared(at_once=True)
            _error, _result = Shared(at_once=True), Shared(at_once=True)
            _operation, _description, _operations, _site = None, "an operation", 1, ""

            def __init__(self, number: Any) -> None:
                self.number, self.name_in_model = number, ("task", *number)
                self._queue, self.new_work = classes, Work(number)

        self._queue, self._new_task = Queue, Task

    def task(self, number: Any) -> Any:
        """Return the object that stands for a task in this run."""
        if number not in self._tasks:
            self._tasks[number] = self._new_task(number)
        return self._tasks[number]

    def perform(self, *more: object) -> tuple[Any, ...]:
        """Run an operation, as the queue of operations does."""
        number = perform("begins an operation")
        perform("ends an operation", number)
        return ()

    def leave(self, description: str, error: BaseException) -> str:
        """Leave an operation that was interrupted."""
        perform("leaves an operation")
        return "it was interrupted"

    def caller(self, rank: int) -> Any:
        """Do what a thread of the program does; after an interrupt, only what is to be done at its end."""
        self._tasks = {}
        queue = self._queue()
        called: list[Any] = []
        program = self._case.programs[rank]
        with contextlib.suppress(KeyboardInterrupt):
            for number, what in enumerate(program.rstrip("c")):
                self._do(queue, called, (rank, number), what)
        for _ in range(program.count("c")):
            perform("is last")
            try:
                queue.close(1.0)
            except KeyboardInterrupt:
                queue.close(1.0)
        return DONE

    def _do(self, queue: Any, called: list[Any], name: Any, what: str) -> None:
        if what == "s":
            task = self.task(name)
            called.append(task.new_work)
            task.new_work.progress = queue.progress
            queue.submit(task)
        elif what == "w":
            called.pop(0).wait()
        else:
            work = called.pop(0)
            if (start := work.start) is not None:
                start()
            work.await_end()

    def thread(self) -> Any:
        """Run the queue's own thread."""
        if resumed() is None:
            if not perform("is started"):
                return DONE
            turn(())
        self._tasks = {}
        looks = 0

        def await_task(address: int) -> int:
            nonlocal looks
            looks += 1
            if looks > 1:
                turn(())
            return int(_KERNELS["await_task"](address))

        self._module.__dict__["doorbell"] = SimpleNamespace(
            **_DOORBELL, **(_KERNELS | {"await_task": await_task})
        )
        self._queue()._run()
        return DONE


class _Tasks(ModelList):
    """The tasks in the queue: their numbers, and the objects that stand for them."""

    def __init__(self, classes: _Classes) -> None:
        super().__init__("tasks")
        self._classes = classes

    def append(self, item: Any) -> None:
        super().append((item[0], item[1].number))

    def __getitem__(self, place: int) -> Any:
        number, name = super().__getitem__(place)
        return number, self._classes.task(name)


class _Sleepers(ModelList):
    """Locks on which threads sleep."""

    def append(self, item: Any) -> None:
        super().append(item.name)

    def __iter__(self) -> Any:
        return (ModelLock(name) for name in super().__iter__())


def _begin(world: ProtocolWorld, rank: int, choice: Any) -> int:
    if world.facts["running"] >= 0:
        raise WrongResult("two operations run at once")
    world.facts["running"] = rank
    return len(world.facts["ran"])


def _end(world: ProtocolWorld, rank: int, choice: Any, number: int) -> None:
    world.facts["running"] = -1
    world.facts["ran"] = (*world.facts["ran"], number)


def _leave(world: ProtocolWorld, rank: int, choice: Any) -> None:
    world.facts["running"] = -1


def _may_take_in_time(world: ProtocolWorld, rank: int, name: Any, again: bool) -> Iterable[Any]:
    """Let a sleeper look again after a while where an interrupt may have kept it from being woken."""
    if choices := list(threads.CHOICES["takes"](world, rank, name, again)):
        yield from choices
    elif world.interrupts:
        for fact, sleepers in world.facts.items():
            if (
                fact[0] == "sleepers of"
                and name in sleepers
                and world.facts.get(("work", *fact[1:], "_ended"))
            ):
                yield "times out"


def _only_when(test: Any) -> Any:
    def choices(world: ProtocolWorld, rank: int) -> Iterable[Any]:
        if test(world, rank):
            yield ""

    return choices


def _others_have_ended(world: ProtocolWorld, rank: int) -> bool:
    last = len(world.results) - 1
    return all(result is not None for other, result in enumerate(world.results[:last]) if other != rank)


def _start(world: ProtocolWorld, rank: int, choice: Any) -> None:
    world.facts["started"] = True


def _nothing(world: ProtocolWorld, rank: int, choice: Any) -> None:
    pass


SERVICES: dict[str, Any] = {
    **threads.SERVICES,
    "begins an operation": _begin,
    "leaves an operation": _leave,
    "ends an operation": _end,
    "starts the thread": _start,
    "is started": lambda world, rank, choice: bool(world.facts.get("started")),
    "is last": _nothing,
    "joins": _nothing,
    "looks whether it runs": lambda world, rank, choice: world.results[-1] is None,
}
CHOICES: dict[str, Any] = {
    **threads.CHOICES,
    "takes in time": _may_take_in_time,
    "is started": _only_when(
        lambda world, rank: world.facts.get("started") or _others_have_ended(world, rank)
    ),
    "is last": _only_when(_others_have_ended),
    "joins": _only_when(lambda world, rank: world.results[-1] is not None),
}
_REPLACED: dict[str, dict[str, Any]] = {
    "progress": {
        "doorbell": SimpleNamespace(**_DOORBELL, **_KERNELS),
        "threading": THREADING,
        "start_thread": lambda thread: perform("starts the thread"),
        "_started": _Nobody(),
    },
    "torchestra.communicator.work": {"threading": THREADING},
}
