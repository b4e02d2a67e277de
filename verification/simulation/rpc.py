"""Simulate RPC workers: calls, remote references, and how the workers shut down.

Each worker calls functions on others in all ways there are, keeps, passes on, fetches and drops references,
and then shuts down together with the others: all by the public functions. Meanwhile workers crash or are
stopped, and the network is slow, cut, or resets connections. Checked are:

* each call ends once: by its result, or by an error that blames only workers that may have seemed to be gone;
* no call is executed twice, and none that has a result was not executed;
* a value stays as long as a worker that lives has a reference to it, and goes after the last: when all are
  dropped, no worker has a value, a fork, a user or a pending call left, workers that lost others included;
* ``shutdown()`` always returns; without an error only when no call is under way anywhere;
* where nothing lasts long and nobody dies, no call fails, and all workers shut down without an error.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from torchestra import rpc
from torchestra.errors import DistError, RemoteReferenceError, RpcError, RpcTimeoutError, WorkerFailedError
from torchestra.rpc.agent import Agent
from torchestra.rpc.current import current_agent
from torchestra.store import TCPStore
from torchestra.world.registry import thread_rank
from verification.simulation.faults import drawn
from verification.simulation.rpc_calls import Call, DeliberateError
from verification.simulation.scheduler import active
from verification.simulation.sockets import here
from verification.simulation.world import PORT, JobWorld, Plan, draw_quality

BOUND_S = 2.0
_FAULTS_S, _LIMIT_S = 4.0, 400.0
_TIMEOUT_S, _SHORT_TIMEOUT_S, _SHUTDOWN_S = 30.0, 0.1, 60.0
_SHAPES = (
    *((0, 0), (0, 1), (0, 0, 0), (0, 1, 2), (0, 0, 1, 1), (0, 1, 2, 3)),
    *((0, 0, 0, 1, 1, 2), (0, 0, 1, 1, 2, 2, 3, 3)),
)


def plan(seed: int) -> Plan:
    """Draw a run."""
    choices = random.Random(f"{seed} plan")
    hosts = choices.choice(_SHAPES)
    faults = drawn(choices, hosts, max(hosts) + 1, BOUND_S, _FAULTS_S)
    return Plan(seed, hosts, choices.choice((0.0, 0.01, 0.1)), draw_quality(choices), faults)


class Value:
    """A value that references refer to. Its copies on other workers are texts."""

    def __init__(self, token: int) -> None:
        self._token, self._world, self._rank = token, RpcWorld.current, rank_here()
        self._world.values[token] = self._rank

    def __reduce__(self) -> tuple[Callable[[int], str], tuple[int]]:
        return copy_of, (self._token,)

    def __del__(self) -> None:
        run = active()
        if run is not None and run is self._world.run and not run.is_ending:
            self._world.note_freed(self._token, self._rank)

    def text(self) -> str:
        return copy_of(self._token)


def copy_of(token: int) -> str:
    """Return what another worker gets of a value."""
    return f"copy of value {token}"


class RpcWorld(JobWorld):
    """The workers of one run; their outcomes are ``"done"``, ``"left alone"`` or ``"failed"``.

    Attributes:
        current: the world that runs.
        calls: by number; all that were made.
        values: by number, the rank of the owner, until they are freed.
        shelves: by rank, the references that it holds: the value's number and the reference.
        agents: by rank.
        ready: the ranks that have dropped all references.
        checked: those that were seen to keep nothing.
        ending: the ranks that have called ``shutdown()``, which drops those in use.
    """

    current: RpcWorld

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, _LIMIT_S, BOUND_S)
        RpcWorld.current = self
        self.calls: list[Call] = []
        self.values: dict[int, int] = {}
        self.shelves: list[list[tuple[int, rpc.RRef]]] = [[] for _ in self.ranks]
        self.agents: dict[int, Agent] = {}
        self.ready: set[int] = set()
        self.checked: set[int] = set()
        self.ending: set[int] = set()
        self._settles = random.Random(f"{plan.seed} settles").random() < 0.6

    def program(self, rank: int) -> str:
        """Be a worker; return how that has ended."""
        try:
            store = TCPStore(self.network.address(self.server_machine), PORT, timeout=_TIMEOUT_S)
            with thread_rank(rank, len(self.ranks), store, f"machine-{self.plan.hosts[rank]}"):
                options = rpc.RpcBackendOptions(
                    rpc_timeout=_TIMEOUT_S, heartbeat_timeout=BOUND_S, num_worker_threads=2
                )
                rpc.init_rpc(
                    name_of(rank), rank=rank, world_size=len(self.ranks), rpc_backend_options=options
                )
                self.has_begun = True
                self.agents[rank] = current_agent()
                self.work(rank)
                if self._settles:
                    self._settle(rank)
                return self._shut_down(rank)
        except DistError as error:
            if rank in self.agents:
                raise
            self.run.note(f"rank {rank} could not begin: {type(error).__name__}: {error}")
            return "failed"

    def work(self, rank: int) -> None:
        """Make calls."""
        Program(self, rank).go()

    # -- what the functions called tell

    def new_call(self, by: int, to: int, what: str, *, may_time_out: bool = False) -> int:
        """Enter a call, and return its number."""
        self.calls.append(Call(by, to, what, may_time_out))
        return len(self.calls) - 1

    def begin(self, token: int) -> None:
        """Note that a call is executed by the calling thread's worker."""
        call, rank = self.calls[token], rank_here()
        call.executed += 1
        if call.executed > 1:
            self.run.fail(f"{call} is executed twice")
        if call.to != rank:
            self.run.fail(f"{call} is executed on rank {rank}")

    def note_freed(self, token: int, owner: int) -> None:
        """Note that a value is freed; no worker that lives may refer to it."""
        del self.values[token]
        if self.agents[owner].closed or self.is_harmed():
            return
        for rank, shelf in enumerate(self.shelves):
            if any(each == token for each, _ in shelf) and rank not in self.ending:
                self.run.fail(f"value {token} of rank {owner} was freed while rank {rank} refers to it")

    # -- what is promised

    def disturbed(self, rank: int, least_s: float) -> bool:
        """See :class:`World`. A connection between workers that is reset is not made again."""
        host = self.plan.hosts[rank]
        resets = (fault for fault in self.plan.faults if fault.kind == "reset")
        return super().disturbed(rank, least_s) or any(
            host in (fault.host, fault.other) or fault.other < 0 for fault in resets
        )

    def is_guilty(self, rank: int) -> bool:
        """See :class:`JobWorld`; one that cannot begin or end together with the others leaves alone."""
        leaves = rank not in self.agents or rank in self.ending
        return super().is_guilty(rank) or (self.is_harmed() and leaves)

    def _any_disturbed(self) -> bool:
        return any(self.disturbed(rank, 0.5 * BOUND_S) for rank in range(len(self.ranks)))

    def judge(self, token: int, error: BaseException) -> None:
        """Check that a call may end with this error, and that it blames nobody who has done nothing."""
        call = self.calls[token]
        self.run.note(f"{call} ended: {type(error).__name__}: {str(error).splitlines()[0]}")
        if isinstance(error, DeliberateError):
            if call.what != "refuse" or f"call {token} " not in str(error):
                self.run.fail(f"{call} ended with an error of another: {error}")
        elif not (call.may_time_out and isinstance(error, RpcTimeoutError)):
            self.judge_error(str(call), (call.by, call.to), error)

    def judge_error(self, what: str, by: tuple[int, ...], error: BaseException) -> None:
        """Check that something may end with this error on one of these ranks."""
        if isinstance(error, WorkerFailedError):
            self._judge_blame(what, by, error)
        elif isinstance(error, RpcTimeoutError):
            if not self._any_disturbed():
                self.run.fail(f"{what} timed out though nothing lasted long: {error}")
        elif not (isinstance(error, RemoteReferenceError) and self.is_harmed()):
            self.run.fail(f"{what} ended with {type(error).__name__}: {error}")

    def _judge_blame(self, what: str, by: tuple[int, ...], error: WorkerFailedError) -> None:
        blamed = [rank for rank in range(len(self.ranks)) if name_of(rank) == error.worker]
        if not blamed:
            self.run.fail(f"{what} ended with an error that names {error.worker!r}: {error}")
        elif not self.is_guilty(blamed[0]) and not any(self.disturbed(each, 0.5 * BOUND_S) for each in by):
            self.run.fail(f"{what} blames {error.worker!r}, which is well: {error}")

    def _settle(self, rank: int) -> None:
        """Wait until all have dropped their references and lost workers are noticed; nothing may be left."""
        self._await_all(rank, self.ready)
        quiet = max((fault.ends for fault in self.plan.faults), default=0.0) + 3 * BOUND_S
        self.time.sleep(max(0.0, quiet - self.run.now) + 1.0)
        self.shelves[rank].clear()  # what others have passed on meanwhile
        self.time.sleep(1.0)
        if not self._any_disturbed():
            self.check_nothing_left(rank)
        self._await_all(rank, self.checked)  # or who has shut down is lost to the others, which frees more

    def _await_all(self, rank: int, there: set[int]) -> None:
        """Wait until all ranks that live have come here."""
        there.add(rank)
        while not all(
            each in there or each in self.outcomes or process.has_crashed
            for each, process in enumerate(self.ranks)
        ):
            self.time.sleep(0.1)

    def check_nothing_left(self, rank: int) -> None:
        """Check that a worker keeps nothing, when all references are dropped and all calls are over."""
        left = self.left(rank)
        if left:
            gc.collect()  # references in cycles
            self.time.sleep(1.0)
            left = self.left(rank)
        if left:
            self.run.fail(f"all references are dropped, and rank {rank} still has {left}")

    def left(self, rank: int) -> dict[str, int]:
        """Return how much of what a worker keeps; nothing when all is over."""
        agent = self.agents[rank]
        counts = agent.rrefs.counts()
        counts["pending calls"] = len(agent.pending) + len(agent.waits)
        counts["values not freed"] = sum(owner == rank for owner in self.values.values())
        return {name: count for name, count in counts.items() if count}

    def _shut_down(self, rank: int) -> str:
        self.ending.add(rank)
        try:
            try:
                rpc.shutdown(timeout=_SHUTDOWN_S)
            except RemoteReferenceError as error:  # told after all else is done
                if "Leaking RRefs" not in str(error) or not self.shelves[rank]:
                    raise
        except (RpcError, RuntimeWarning) as error:
            self.run.note(f"rank {rank}: shutdown(): {type(error).__name__}: {str(error).splitlines()[0]}")
            if isinstance(error, WorkerFailedError):
                self._judge_blame(f"shutdown() of rank {rank}", (rank,), error)
            if not self.is_harmed():
                self.run.fail(f"shutdown() of rank {rank} ended with {type(error).__name__}: {error}")
            return "left alone"
        for call in self.calls:
            if not call.ended and not self.ranks[call.by].has_crashed and call.by not in self.outcomes:
                self.run.fail(f"rank {rank} has shut down before {call} was over")
        return "done"

    def go(self) -> None:
        super().go()
        for call in self.calls:
            if call.ended != 1 and not self.ranks[call.by].has_crashed:
                self.run.fail(f"{call} has ended {call.ended} times")
        if not self.is_harmed() and set(self.outcomes.values()) != {"done"}:
            self.run.fail(f"nothing lasted long, and the workers ended as {self.outcomes}")
        self.run.raise_failure()


class Program:
    """What one worker does."""

    def __init__(self, world: RpcWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self._choices = random.Random(f"{world.plan.seed} program {rank}")
        self._shelf = world.shelves[rank]
        self._futures: list[tuple[int, Future[Any], object]] = []

    def go(self) -> None:
        """Make calls, wait for what was begun, and drop all references."""
        choices, actions = self._choices, self.actions()
        for _ in range(choices.randint(4, 14)):
            choices.choice(actions)()
            self._world.time.sleep(choices.choice((0.0, 0.01, 0.3)))
        if choices.random() < 0.7:
            self._await_all()
        self._futures.clear()
        self._shelf.clear()

    def actions(self) -> list[Callable[[], None]]:
        """Return what it may do."""
        calls = [self._call, self._call_later, self._add, self._relay, self._relay_later, self._refuse]
        references = [self._make, self._make, self._fetch, self._pass_on, self._hand_over, self._borrow]
        return [*calls, *references, self._drop]

    def _other(self) -> int:
        return self._choices.randrange(len(self._world.ranks))

    def _await_all(self) -> None:
        for token, future, expected in self._futures:
            self._judged(token, future.wait, expected)

    def _judged(
        self, token: int, wait: Callable[[], Any], expected: object = None, *, is_over: bool = True
    ) -> Any:
        """Wait for a call, and check how it ended, if it is over; return the result, None after an error."""
        world, call = self._world, self._world.calls[token]
        try:
            result = wait()
        except (RpcError, DeliberateError) as error:
            world.judge(token, error)
            return None
        if is_over and call.executed != 1:
            world.run.fail(f"{call} has a result and was executed {call.executed} times")
        if expected is not None and result != expected:
            world.run.fail(f"{call} gave {result!r}, not {expected!r}")
        return result

    def _sync(self, function: Any, to: int, arguments: tuple[Any, ...], expected: object = None) -> Any:
        """Call a function and wait; return the result, None after an error."""
        world, is_short = self._world, self._choices.random() < 0.1
        token = world.new_call(self._rank, to, function.__name__, may_time_out=is_short)
        timeout = _SHORT_TIMEOUT_S if is_short else _TIMEOUT_S

        wait = partial(rpc.rpc_sync, name_of(to), function, (token, *arguments), timeout=timeout)
        try:
            return self._judged(token, wait, expected)
        finally:
            world.calls[token].ended += 1

    def _async(self, function: Any, to: int, arguments: tuple[Any, ...], expected: object = None) -> None:
        """Call a function; wait for it later."""
        token = self._world.new_call(self._rank, to, function.__name__)
        future = self._judged(token, lambda: call_later(token, function, to, *arguments), is_over=False)
        if future is None:  # it could not be made, as a reference within has no value
            self._world.calls[token].ended += 1
        else:
            self._futures.append((token, future, expected))

    def _call(self) -> None:
        to, seconds = self._other(), self._choices.choice((0.0, 0.02, 0.5))
        self._sync(execute, to, (seconds,), to)

    def _call_later(self) -> None:
        for _ in range(self._choices.choice((1, 1, 4))):
            to, seconds = self._other(), self._choices.choice((0.0, 0.1, 2.0))
            self._async(execute, to, (seconds,), to)

    def _add(self) -> None:
        sent = torch.arange(self._choices.choice((3, 2000, 20_000, 200_000)))
        result = self._sync(add, self._other(), (sent,))
        if result is not None and not torch.equal(result, sent + 1):
            self._world.run.fail(f"rank {self._rank} got a wrong sum: {result}")

    def _relay(self) -> None:
        to = self._other()
        self._sync(relay, self._other(), (to,), to)

    def _relay_later(self) -> None:
        to = self._other()
        self._async(relay_later, self._other(), (to,), to)

    def _refuse(self) -> None:
        self._sync(refuse, self._other(), ())

    def _make(self) -> None:
        to, seconds = self._other(), self._choices.choice((0.0, 0.2))
        token = self._world.new_call(self._rank, to, "make")
        self._world.calls[token].ended = 1  # nobody waits for it
        self._shelf.append((token, rpc.remote(name_of(to), make, (token, seconds))))

    def _fetch(self) -> None:
        if not self._shelf:
            return
        value, rref = self._choices.choice(self._shelf)
        owner = rref.owner().id
        token = self._world.new_call(self._rank, owner, "to_here")
        self._world.calls[token].executed = self._world.calls[token].ended = 1
        if self._choices.random() < 0.5:
            self._judged(token, rref.rpc_sync().text, copy_of(value))
        else:
            self._judged(token, lambda: _text(rref.to_here()), copy_of(value))

    def _pass_on(self) -> None:
        if self._shelf:
            passed = self._choices.choice(self._shelf)
            call = self._choices.choice((self._sync, self._async))
            call(keep, self._other(), passed)

    def _hand_over(self) -> None:
        if self._shelf:
            self._async(keep, self._other(), self._shelf.pop())

    def _borrow(self) -> None:
        lent = self._sync(lend, self._other(), ())
        if lent is not None:
            self._shelf.append(lent)

    def _drop(self) -> None:
        if self._shelf:
            del self._shelf[self._choices.randrange(len(self._shelf))]


def name_of(rank: int) -> str:
    """Return the name of a worker."""
    return f"worker-{rank}"


def rank_here() -> int:
    """Return the rank of the calling thread."""
    return RpcWorld.current.ranks.index(here())


def _text(value: Any) -> Any:
    return value.text() if isinstance(value, Value) else value


def call_later(token: int, function: Any, to: int, *arguments: Any) -> Future[Any]:
    """Call a function of this module, and count how often that ends."""
    call = RpcWorld.current.calls[token]

    def count(_: object) -> None:
        call.ended += 1

    future = rpc.rpc_async(name_of(to), function, (token, *arguments), timeout=_TIMEOUT_S)
    future.add_done_callback(count)
    return future


# Functions that are called. The first argument is the number of the call.


def execute(token: int, seconds: float) -> int:
    """Take so long; return the rank."""
    world = RpcWorld.current
    world.begin(token)
    world.time.sleep(seconds)
    return rank_here()


def add(token: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, and 1 more."""
    RpcWorld.current.begin(token)
    return tensor + 1


def relay(token: int, to: int) -> Any:
    """Have a third worker execute something, and wait for it."""
    world = RpcWorld.current
    world.begin(token)
    inner = world.new_call(rank_here(), to, "execute")
    try:
        return rpc.rpc_sync(name_of(to), execute, (inner, 0.01), timeout=_TIMEOUT_S)
    finally:
        world.calls[inner].ended += 1


@rpc.functions.async_execution
def relay_later(token: int, to: int) -> Future[Any]:
    """Have a third worker execute something."""
    world = RpcWorld.current
    world.begin(token)
    inner = world.new_call(rank_here(), to, "execute")
    return call_later(inner, execute, to, 0.2)


def refuse(token: int) -> None:
    """Raise a DeliberateError."""
    RpcWorld.current.begin(token)
    raise DeliberateError(f"call {token} was to fail")


def make(token: int, seconds: float) -> Value:
    """Return a value, which has the number of the call."""
    execute(token, seconds)
    return Value(token)


def keep(token: int, value: int, rref: rpc.RRef) -> None:
    """Keep a reference."""
    RpcWorld.current.begin(token)
    RpcWorld.current.shelves[rank_here()].append((value, rref))


def lend(token: int) -> tuple[int, rpc.RRef] | None:
    """Return a reference that is kept here, with its value's number."""
    world, shelf = RpcWorld.current, RpcWorld.current.shelves[rank_here()]
    world.begin(token)
    return world.choices.choice(shelf) if shelf else None
