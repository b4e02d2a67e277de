"""Calls in torch's profilers, and what called workers do as events of the caller's profile.

Any profiler that is on has calls as ranges. Within a :class:`profile`, a call takes the settings along, as
arguments of :func:`run_profiled`: the worker that is called runs the function under torch's legacy profiler,
and answers with the result and its events (:class:`ProfiledResult`). The caller puts them in the middle of
the time that the call took, so that the clocks of the two need not agree, and names them
``<call>#remote_op: <operation>``. A worker that is profiled so and calls others hands on what they answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.futures import Future

from torchestra.rpc.calls import name_of, refuse_other_than_future
from torchestra.rpc.functions import MARK, async_execution
from torchestra.rpc.package_functions import TAKES_AGENT, takes_agent
from torchestra.rpc.worker_info import WorkerInfo

__all__ = ["is_recorded", "profile", "profiler_is_on", "recorded", "run_profiled", "unrecorded"]

REMOTE_OPERATION = "#remote_op: "
profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled

_autograd: Any = torch.autograd
_legacy: Any = profiler_legacy
_new_event: Any = FunctionEvent
_new_list: Any = EventList
_now_ns = time.perf_counter_ns
_NS_PER_US = 1e3


class ProfileSettings(NamedTuple):
    """What a profile records, by torch's names."""

    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False

    def start(self) -> None:
        """Turn torch's legacy profiler on for this thread."""
        config = _autograd.ProfilerConfig(
            _autograd.ProfilerState.CPU, *self, torch._C._profiler._ExperimentalConfig()
        )
        _legacy._enable_profiler_legacy(config)


@dataclass(slots=True)
class CalleeEvent:
    """An operation of a called worker, or a call that it has made.

    Attributes:
        name, node_id, thread, is_async: as in torch's events; the worker's number is the node's.
        start_us, end_us: since the profiled call began.
        more: further arguments of torch's event.
    """

    name: str
    node_id: int
    thread: int
    is_async: bool
    start_us: float
    end_us: float
    more: dict[str, Any]

    def for_torch(self) -> Any:
        """Return torch's event."""
        return _new_event(
            id=0,
            name=self.name,
            trace_name=self.name,
            node_id=self.node_id,
            thread=self.thread,
            start_us=self.start_us,
            end_us=self.end_us,
            is_async=self.is_async,
            is_remote=True,
            is_legacy=True,
            **self.more,
        )


@dataclass(slots=True)
class ProfiledResult:
    """What a profiled function has returned, the events, and how long it took."""

    value: Any
    events: list[CalleeEvent]
    took_us: float

    def taken_from(self, future: Future[Any]) -> Any:
        """Take over what the future of an answer has; return the result of the function."""
        try:
            answer = future.value()
        finally:
            del future  # as in PendingCall.wait
        self.value, self.events, self.took_us = None, answer.events, answer.took_us
        return answer.value

    def placed(self, key: str, start_us: float, end_us: float) -> list[CalleeEvent]:
        """Return the events of a call of this name, in the middle of the time from call to answer."""
        shift = start_us + max(0.0, end_us - start_us - self.took_us) / 2
        return [
            replace(
                event,
                name=key + REMOTE_OPERATION + event.name,
                start_us=event.start_us + shift,
                end_us=event.end_us + shift,
            )
            for event in self.events
        ]


class CallRecorder:
    """Collects the events of the calls that one thread makes in a profile, or in a profiled call.

    Attributes:
        settings: what called workers are to record.
        number: of the worker that calls, -1 before it has called.
        ranges: in a profile, the name of each call and its answer, by the name of its range there: by the
            range's times, which are of torch's clock, the events are placed.
        events: in a profiled call, what this worker and those that it calls have recorded.
    """

    def __init__(self, settings: ProfileSettings) -> None:
        self.settings = settings
        self.number = -1
        self.ranges: dict[str, tuple[str, ProfiledResult]] = {}
        self.events: list[CalleeEvent] = []
        self._began = _now_ns()

    @property
    def elapsed_us(self) -> float:
        """Return the time since it was made."""
        return (_now_ns() - self._began) / _NS_PER_US

    def call_in_profile(self, key: str, make: Callable[..., Future[Any]]) -> Future[Any]:
        """Make a call as a range of the profile, under a name of its own."""
        answer = ProfiledResult(None, [], 0.0)
        name = f"{key} ({len(self.ranges)})"
        self.ranges[name] = key, answer
        with torch.autograd.profiler.record_function(name) as record:
            future: Future[Any] = record._call_end_callbacks_on_future(make(answered=answer.taken_from))
        return future

    def placed(self, events: list[Any]) -> list[Any]:
        """Return torch's events of the profile, and those of called workers, by their final names."""
        placed = list(events)
        for event in events:
            event.node_id = self.number
            if event.name in self.ranges:
                key, answer = self.ranges[event.name]
                event.name = event.trace_name = key
                within = event.time_range
                placed += [each.for_torch() for each in answer.placed(key, within.start, within.end)]
        return placed

    def call_in_call(self, key: str, make: Callable[..., Future[Any]]) -> Future[Any]:
        """Make a call while this worker executes a profiled one."""
        sent_us = self.elapsed_us

        def answered(future: Future[Any]) -> Any:
            answer = ProfiledResult(None, [], 0.0)
            value = answer.taken_from(future)
            end_us, more = self.elapsed_us, dict[str, Any](stack=[], input_shapes=[])
            # Asynchronous for torch: it may end on another thread, and is nobody's parent.
            whole = CalleeEvent(key, self.number, 0, True, sent_us, end_us, more)
            self.events += [whole, *answer.placed(key, sent_us, end_us)]
            return value

        return make(answered=answered)


class _ThreadState(threading.local):
    """What records the calls of a thread.

    Attributes:
        recorder: of its profile or of the profiled call that it executes.
        is_profiled_call: the recorder is of such a call.
        muted: calls are no ranges of the profiler now.
    """

    recorder: CallRecorder | None = None
    is_profiled_call = False
    muted = False


_state = _ThreadState()
server_profiles: list[server_process_profile] = []


def is_recorded() -> bool:
    """Return whether a call that this thread makes now is a range of the profiler that is on."""
    return not _state.muted


class unrecorded:
    """Make calls in the block no ranges of a profiler."""

    def __enter__(self) -> None:
        self._before, _state.muted = _state.muted, True

    def __exit__(self, *error: object) -> None:
        _state.muted = self._before


def recorded(
    mode: str,
    function: Any,
    caller: WorkerInfo,
    called: WorkerInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    call: Callable[..., Future[Any]],
) -> Future[Any]:
    """Make a call, as a range of the active profiler from now until the answer is there.

    Args:
        mode: "sync", "async" or "remote".
        call: makes it, of a function and its arguments; ``answered=`` is called with the future of the
            answer, and returns the result.
    """
    key = f"rpc_{mode}#{_name_in_profiles(function)}({caller.name} -> {called.name})"
    recorder = _state.recorder
    if recorder is None:
        with torch.autograd.profiler.record_function(key) as record:
            future: Future[Any] = record._call_end_callbacks_on_future(call(function, args, kwargs))
        return future
    recorder.number = caller.id
    make = partial(call, run_profiled, (recorder.settings, function, args, kwargs or {}), None)
    if _state.is_profiled_call:
        return recorder.call_in_call(key, make)
    return recorder.call_in_profile(key, make)


def _name_in_profiles(function: Any) -> str:
    """Return the name of a function as torch has it: builtins and scripts have names of their own."""
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.qualified_name)
    builtin: str | None = torch.jit._builtins._find_builtin(function)
    return builtin or name_of(function)


def profiled_call(
    agent: Any,
    to: int,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    answered: Callable[[Future[Any]], Any] | None = None,
    **options: Any,
) -> Future[Any]:
    """Make a call by an Agent; see :func:`recorded`."""
    future: Future[Any] = agent.call(to, function, args, kwargs, **options)
    return future if answered is None else future.then(answered)


# -- on the worker that is called


@async_execution
@takes_agent
def run_profiled(
    agent: Any, settings: ProfileSettings, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[ProfiledResult]:
    """Call a function as its caller's profile asks for."""
    recorder = CallRecorder(settings)
    recorder.number = agent.number
    if getattr(function, TAKES_AGENT, None) is True:
        args = (agent, *args)
    before = _state.recorder, _state.is_profiled_call
    _state.recorder, _state.is_profiled_call = recorder, True
    try:
        result, events = _run_under_profiler(settings, function, args, kwargs)
    finally:
        _state.recorder, _state.is_profiled_call = before
    recorder.events += [_event_of(event, agent.number) for event in events]
    if hasattr(function, MARK):
        refuse_other_than_future(result)
        answer: Future[ProfiledResult] = result.then(partial(_answer_of, recorder))
        return answer
    done: Future[ProfiledResult] = Future()
    done.set_result(ProfiledResult(result, recorder.events, recorder.elapsed_us))
    return done


def _answer_of(recorder: CallRecorder, future: Future[Any]) -> ProfiledResult:
    try:
        return ProfiledResult(future.value(), recorder.events, recorder.elapsed_us)
    finally:
        del future  # as in PendingCall.wait


def run_for_server_profiles(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call a function that another worker has called, while a :class:`server_process_profile` is on."""
    profiles = tuple(server_profiles)
    if function is run_profiled or not profiles:
        return function(*args, **kwargs or {})
    result, _ = _run_under_profiler(profiles[-1].settings, function, args, kwargs or {})
    return result


def _run_under_profiler(
    settings: ProfileSettings, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """Call a function; return its result and torch's events of its operations on this thread."""
    if profiler_is_on():  # one that sees all threads, and there can be only one
        return function(*args, **kwargs), []
    profiles = tuple(server_profiles)
    began_s = time.perf_counter()
    settings.start()
    try:
        result = function(*args, **kwargs)
    finally:
        records = _legacy._disable_profiler_legacy()
    events = _legacy._parse_legacy_records(records)
    for each in profiles:
        each.record(records, began_s)
    return result, events


def _event_of(event: Any, number: int) -> CalleeEvent:
    """Return torch's event as it is sent to the caller."""
    more = {
        name: getattr(event, name)
        for name in (
            "input_shapes",
            "stack",
            "scope",
            "cpu_memory_usage",
            "sequence_nr",
            "fwd_thread",
            "flops",
        )
    }
    time_range = event.time_range
    return CalleeEvent(
        event.name, number, event.thread, event.is_async, time_range.start, time_range.end, more
    )


# -- profiles


class profile(profiler_legacy.profile):
    """torch's legacy profile (``torch.autograd.profiler_legacy.profile``), with what called workers do.

    Their operations are among ``function_events`` where the answer of the call came within the block:
    ``is_remote``, with the worker's number as ``node_id``.
    """

    def _start_trace(self) -> None:
        _legacy.profile._start_trace(self)
        self._recorder = CallRecorder(_settings_of(self))
        self._before, _state.recorder = _state.recorder, self._recorder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> Any:
        if not self.enabled:
            return None
        _state.recorder = self._before
        events = _legacy._parse_legacy_records(_legacy._disable_profiler_legacy())
        self.function_events = _listed(self, self._recorder.placed(events))
        return False


class server_process_profile(profile):
    """A legacy profile of all that other workers call on this one, on whatever threads, from now on.

    Attributes:
        process_global_function_events: the events, in a list for each call.
    """

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        self.settings = _settings_of(self)
        self.recorded: list[list[Any]] = []
        self._began_s = time.perf_counter()
        server_profiles.append(self)
        return self

    def record(self, records: Any, began_s: float) -> None:
        """Record what torch has of a call.

        Its times are those since the call began: of two calls one would seem to be within the other.
        """
        events = _legacy._parse_legacy_records(records)
        shift_us = 1e6 * (began_s - self._began_s)
        for event in events:
            event.time_range.start += shift_us
            event.time_range.end += shift_us
        self.recorded.append(events)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> Any:
        if not self.enabled:
            return None
        server_profiles.remove(self)
        self.process_global_function_events = list(self.recorded)
        self.function_events = _listed(self, [event for events in self.recorded for event in events])
        return False


def _settings_of(profile: Any) -> ProfileSettings:
    return ProfileSettings(*(bool(getattr(profile, name)) for name in ProfileSettings._fields))


def _listed(profile: Any, events: list[Any]) -> Any:
    """Return torch's list of events, in the order of their beginnings."""
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    listed = _new_list(
        events,
        use_device="cuda" if profile.use_cuda else None,
        profile_memory=profile.profile_memory,
        with_flops=profile.with_flops,
    )
    listed._build_tree()
    return listed
