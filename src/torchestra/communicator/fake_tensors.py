"""Operations on tensors that have a shape, but no elements: fake ones, and those of the device "meta".

Programs run with these to plan memory or to be traced. As with torch's fake kernels, nothing is sent: the
arguments are checked, results have their shapes, and the operation has ended at once (engine/fake.py). Such
tensors are noticed where the checks refuse them, so this costs nothing for others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torchestra.communicator.host_staging import tensors_in
from torchestra.engine.fake import FakeEngine
from torchestra.tensors.contiguity import has_no_elements
from torchestra.tensors.override import NoElementsError

_Method = TypeVar("_Method", bound=Callable[..., Any])


def or_fake(method: _Method) -> _Method:
    """Run a method of a communicator in a fake group, if all tensors that it is given have no elements.

    Fake tensors beside others are refused, as the method itself refuses them.
    """

    @functools.wraps(method)
    def call(communicator: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(communicator, *args, **kwargs)
        except NoElementsError:
            if not all(map(has_no_elements, tensors_in([*args, *kwargs.values()]))):
                raise
        communicator.queue.refuse_if_closed(method.__name__)
        fake = FakeEngine(communicator.rank, communicator.size)
        copy = type(communicator)(fake, communicator.name, communicator.timeout_s)
        return method(copy, *args, **kwargs)

    return cast(_Method, call)
