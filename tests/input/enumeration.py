"""Calls every public function wrongly, on two ranks that are threads; run as a program, by the tests.

    python enumeration.py [FIRST [EVERY [NAME]]]

makes calls number FIRST, FIRST + EVERY, ... (of functions that have NAME in theirs) and prints a line of JSON
for each. The line comes before the call is made, so that the last one is of the call that has brought the
process down or hangs. Both ranks make the same wrong call, or, in one case of four, only one of them. Right
after, they sum a tensor.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from right_calls import UNCHECKED, Function, functions, replica_address
from wrong_values import destroyed_groups, wrong_values

import torchestra as dist
from torchestra import functional, rpc
from torchestra.communicator.host_staging import tensors_in
from torchestra.errors import DistError, GroupDestroyedError
from torchestra.tensors.contiguity import has_no_elements
from torchestra.world.registry import thread_rank

SIZE = 2
# What a function's messages may name instead: what it is made of.
ALSO_CALLED = {
    "abort_process_group": ("destroy_process_group",),
    "alltoall_base": ("all_to_all_single",),
    "shrink_when_idle": ("shrink",),
    "all_to_all_single_autograd": ("all_to_all_single",),
    "of_first_ranks": ("DeviceMesh",),
    "from_group": ("DeviceMesh",),
    "find_or_make_group": ("new_group",),
}
SECONDS = 20.0
STUCK = 100.0
MAX_CHARACTERS = 1000


class Case(NamedTuple):
    """A call with one wrong argument."""

    function: Function
    parameter: str
    label: str
    make: Callable[[], object]


def cases(all_functions: list[Function]) -> Iterator[Case]:
    for function in all_functions:
        for parameter, hint in function.hints.items():
            if f"{function.label}.{parameter}" in UNCHECKED:
                continue
            for label, make in wrong_values(function.name, parameter, hint):
                yield Case(function, parameter, label, make)


def call(case: Case) -> Any:
    arguments = case.function.right()
    value = case.make()
    if case.parameter in ("size", "args") and case.function.name in ("empty", "zeros", "ones", "launch"):
        arguments.pop(case.parameter, None)
        return case.function.call(value, **arguments)
    if case.parameter == "self" and case.function.label.startswith("functional."):
        arguments.pop("self")
        return case.function.call(value, **arguments)
    arguments.pop(case.parameter.removeprefix("group_"), None)  # the other way to say the same
    arguments[case.parameter] = value
    return invoke(case.function, arguments)


def invoke(function: Function, arguments: dict[str, Any]) -> Any:
    if function.name in ("empty", "zeros", "ones"):
        size = arguments.pop("size")
        result = function.call(size, **arguments)
    else:
        result = function.call(**arguments)
    if hasattr(result, "__enter__") and function.name == "coalescing_manager":
        with result:
            pass
    if isinstance(result, functional.AsyncCollectiveTensor):
        functional.wait_tensor(result)
    if isinstance(result, dist.Work):
        result.wait()
    return result


def shows(message: str, value: object) -> bool:
    """Return whether a message tells the value, the beginning of a long one, or its kind."""
    kinds = {type(value).__name__, getattr(value, "__name__", None)}
    if isinstance(value, torch.Tensor):  # whose elements may not be there to be shown
        return any(
            word in message for word in ("Tensor", "tensor", "layout", "dtype", "storage", "memory", "device")
        )
    if isinstance(value, (list, tuple)):
        kinds |= {type(each).__name__ for each in value}
    try:
        kinds |= {repr(value), " ".join(repr(value).split())[:16], str(value)}
        if isinstance(value, (list, tuple, range)):
            kinds |= {str(len(value))} | {type(each).__name__ for each in value}
            if all(isinstance(each, int) for each in value):
                kinds |= {str(sum(value))} | {repr(each) for each in value}
    except Exception:
        pass
    return any(kind and kind in message for kind in kinds)


def is_fake_call(case: Case) -> bool:
    """Return whether all tensors of a call are fake or of the device "meta": nothing is sent then."""
    arguments = {**case.function.right(), case.parameter: case.make()}
    given = list(tensors_in(list(arguments.values())))
    return bool(given) and all(map(has_no_elements, given))


def verdict(case: Case, error: BaseException | None) -> str:
    """Return what is wrong with how a call ended; empty if nothing is."""
    if error is None:
        return "" if is_fake_call(case) else "accepted"
    if not isinstance(error, DistError):
        return f"raw: {type(error).__name__}: {str(error)[:300]}"
    message = str(error)
    if isinstance(error, GroupDestroyedError):  # by whichever operation of the group came first
        name = getattr(case.make(), "group_name", "")
        return "" if case.label == "out of range: destroyed" and repr(name) in message else message
    wrong = []
    if "\n" in message:
        wrong.append("several lines")
    if len(message) > MAX_CHARACTERS:
        wrong.append("too long")
    # (Torch spells the group's methods without an underscore where its functions have one.)
    names = (case.function.name, *ALSO_CALLED.get(case.function.name, ()))
    if not any(name.replace("_", "") in message.replace("_", "") for name in names):
        wrong.append("no function")
    if case.parameter not in message:
        wrong.append("no parameter")
    if not shows(message, case.make()):
        wrong.append("no value")
    return f"{', '.join(wrong)}: {type(error).__name__}: {message[:300]}" if wrong else ""


class Run:
    """The calls from one number on, until the last, or until the group is broken."""

    def __init__(self, first: int, every: int, select: str) -> None:
        self.number = first
        self.every = every
        self.select = select
        self.lock = threading.Lock()
        self.last = time.monotonic()
        self.directory = tempfile.mkdtemp()
        self.stores = {
            "HashStore": dist.HashStore(),
            "FileStore": dist.FileStore(os.path.join(self.directory, "store"), 1),
            "PrefixStore": dist.PrefixStore("p", dist.HashStore()),
            "ReplicatedStore": dist.ReplicatedStore([replica_address()]),
            "TCPStore": dist.TCPStore("127.0.0.1", 0, is_master=True),
        }
        for store in self.stores.values():
            store.set_timeout(5)
            store.set("key", b"1")

    def tell(self, **told: Any) -> None:
        with self.lock:
            print(json.dumps(told), flush=True)

    def world(self) -> bool:
        """Make calls in a world of its own; whether there are more to make."""
        shared = dist.HashStore()
        more = [False] * SIZE
        first = self.number

        def body(rank: int) -> None:
            with thread_rank(rank, SIZE, shared):
                dist.init_process_group(timeout=SECONDS)
                destroyed_groups[rank] = destroyed = dist.new_group()
                dist.destroy_process_group(destroyed)
                rpc.init_rpc(f"w{rank}")
                rref = rpc.remote(1 - rank, int)
                try:
                    more[rank] = self.calls(rank, first, rref)
                finally:
                    del rref
                    gc.collect()
                    if rpc.starting.agent_or_none() is not None:
                        rpc.shutdown(graceful=False)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return any(more)

    def calls(self, rank: int, first: int, rref: Any) -> bool:
        found = list(functions(self.stores, rref))
        if rank == 0 and first == 0:
            counts = {f"{each.label}.{name}": 0 for each in found for name in each.hints}
            for each in cases(found):
                counts[f"{each.function.label}.{each.parameter}"] += 1
            self.tell(parameters=counts)
        if first == 0:
            for each in found:
                if each.runs and self.select in each.label:
                    self.last = time.monotonic()
                    self.right(each, rank)
        for number, case in enumerate(cases(found)):
            if number < first or (number - first) % self.every or self.select not in case.function.label:
                continue
            if rank == 0:
                self.last = time.monotonic()
                self.number = number + self.every
                self.tell(number=number, call=f"{case.function.label}({case.parameter}={case.label})")
            if number % 4 != 3 or number // 4 % SIZE == rank:
                error: BaseException | None = None
                try:
                    call(case)
                except BaseException as caught:
                    error = caught
                if problem := verdict(case, error):
                    self.tell(number=number, rank=rank, problem=problem)
            broken = self.out_of_step()
            if broken:
                self.tell(number=number, rank=rank, problem=f"the group is broken: {broken}")
                return True
        return False

    def right(self, function: Function, rank: int) -> None:
        try:
            invoke(function, function.right())
        except BaseException as error:
            self.tell(right=function.label, rank=rank, problem=f"{type(error).__name__}: {error}")

    def out_of_step(self) -> str:
        tensor = torch.ones(3)
        try:
            dist.all_reduce(tensor)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "" if tensor.tolist() == [2.0] * 3 else f"its sum is {tensor.tolist()}"


def watch(run: Run) -> None:
    """End the process where a call hangs."""
    while True:
        time.sleep(1)
        if time.monotonic() - run.last > STUCK:
            run.tell(stuck=True)
            faulthandler.dump_traceback()
            os._exit(3)


def main() -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    first, every, name = (*sys.argv[1:], *("0", "1", "")[len(sys.argv) - 1 :])
    run = Run(int(first), int(every), name)
    threading.Thread(target=watch, args=(run,), daemon=True).start()
    while run.world():
        pass
    run.tell(done=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(4)
