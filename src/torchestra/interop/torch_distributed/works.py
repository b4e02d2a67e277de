"""Pending operations in the form of torch.distributed: Works whose futures are torch's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work as TorchWork

from torchestra.communicator.work import Work
from torchestra.errors import DistError
from torchestra.interop.torch_distributed.errors import as_torch_error
from torchestra.system.untraced import untraced

_NO_LIMIT = (None, timedelta(0))  # torch's C++ passes these if the wait has no time-out of its own

AnyFuture = torch.futures.Future[Any]


@untraced
class TorchestraWork(TorchWork):
    """A :class:`torchestra.Work` as a ``torch.distributed.Work``. Errors are torch.distributed's too."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is done, at most ``timeout`` (None or 0: the operation's limit)."""
        try:
            return self._work.wait(None if timeout in _NO_LIMIT else timeout)
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        error = self._work.exception()
        return as_torch_error(error) if isinstance(error, DistError) else error

    def result(self) -> list[Any]:
        """Return the tensors that the operation has filled."""
        try:
            return self._work.result()
        except DistError as error:
            raise as_torch_error(error) from error.__cause__

    def synchronize(self) -> None:
        """Call :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Call :meth:`wait`: when an operation is done, every stream can use its tensors."""
        self.wait()

    def source_rank(self) -> int:
        """Return the group rank that sent the message of a finished receive."""
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work.source_rank()

    def get_future(self) -> AnyFuture:
        """Return a future of :meth:`result`. If the operation fails, C++ code that waits for it fails too."""
        # A future that Python fails holds the exception as its value, which C++ takes for the result, and
        # crashes. One of torch's own whose callback raises has failed for C++ as well; one of ours has not.
        return torch.futures.Future.then(self._work.get_future(), _value)


def _value(future: AnyFuture) -> Any:
    return future.value()


@untraced
class FinishedWork(TorchWork):
    """The work of an operation that has ended well, which is cheap to make."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass

    def source_rank(self) -> int:
        return -1

    def _source_rank(self) -> int:
        return -1

    def get_future(self) -> AnyFuture:
        future: AnyFuture = torch.futures.Future()
        future.set_result(self._result)
        return future


def joined(works: Sequence[Work], description: str) -> Work:
    """Make a Work that ends when several have ended, with all results in one list or the first error."""
    if not works:
        return Work.finished(description, [])
    whole = Work(description)

    def end(_: Any) -> None:
        error = next((work.exception() for work in works if work.exception() is not None), None)
        if error is not None:
            whole.fail(error)
        else:
            whole.finish([each for work in works for each in work.result()])

    torch.futures.collect_all([work.get_future() for work in works]).add_done_callback(end)
    return whole
