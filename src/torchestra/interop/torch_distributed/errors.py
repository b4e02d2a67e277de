"""Torchestra's errors as torch.distributed's: each is both, so that either name catches it.

``RankFailedError`` here is a ``torchestra.RankFailedError`` and a ``torch.distributed.DistBackendError``, and
so on. Other errors than those of a backend, a store or the network, such as a wrong argument, are raised
unchanged: as a ValueError and a RuntimeError.
"""

from __future__ import annotations

from typing import cast

from torch import distributed

from torchestra import errors
from torchestra.errors import DistError

_BASES: dict[type[DistError], type[Exception]] = {
    errors.DistBackendError: distributed.DistBackendError,
    errors.DistNetworkError: distributed.DistNetworkError,
    errors.DistStoreError: distributed.DistStoreError,
}


def _joined(ours: type[DistError], theirs: type[Exception]) -> type[DistError]:
    body = {"__module__": __name__, "__doc__": ours.__doc__}
    return cast("type[DistError]", type(ours.__name__, (ours, theirs), body))


_JOINED: dict[type[DistError], type[DistError]] = {}
for _ours in [getattr(errors, name) for name in errors.__all__]:
    for _base, _theirs in _BASES.items():
        if issubclass(_ours, _base):
            _JOINED[_ours] = globals()[_ours.__name__] = _joined(_ours, _theirs)  # pickle finds it there


def as_torch_error(error: DistError) -> DistError:
    """Return the error, with its message and attributes, as one of torch.distributed's too."""
    joined = _JOINED.get(type(error))
    if joined is None:
        return error
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple)
    _, arguments, *state = reduced
    made = joined(*arguments)
    for attributes in state:
        made.__dict__.update(attributes or {})
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)
