"""The secret that the processes of one job share."""

from __future__ import annotations

import os
from typing import Union

from torchestra.errors import InvalidArgumentError

SECRET_VARIABLE = "TORCHESTRA_SECRET"
SECRET_ADVICE = f"set {SECRET_VARIABLE} to the same random text on all ranks"

Secret = Union[str, bytes, None]


def job_secret(secret: Secret) -> bytes | None:
    """Return the secret as bytes: the argument, else the environment variable TORCHESTRA_SECRET, else none.

    Raises:
        InvalidArgumentError: the argument is neither a string nor bytes, or is empty.
    """
    if secret is None:
        return os.environb.get(SECRET_VARIABLE.encode()) or None
    if not isinstance(secret, (str, bytes)) or not secret:
        raise InvalidArgumentError("secret must be a string or bytes, and not empty")
    return secret.encode() if isinstance(secret, str) else secret
