"""Files that are memory and have no name, for what processes of one host share."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets

from torchestra.errors import DistBackendError
from torchestra.system.limits import no_descriptors

SHARED_MEMORY = "/dev/shm"
_MFD_NOEXEC_SEAL = 0x8  # since Linux 6.3; some systems refuse memory files without it, or warn of them


def make_memory_file(name: str) -> int:
    """Return a new file, empty, that nobody finds by a name; its descriptor.

    It is made by ``memfd_create`` where the system has that and lets this process call it (gVisor and strict
    seccomp filters may not); otherwise it is one in /dev/shm, mode 0600, which is unlinked at once. That
    cannot be sealed, and its size is bounded by what /dev/shm has free (64 MB in a container of Docker's).

    Args:
        name: told in /proc by a file of the first kind.

    Raises:
        DistBackendError: it can be had in neither way, or there are no descriptors left.
    """
    for flags in (_MFD_NOEXEC_SEAL, 0):
        try:
            return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        except (AttributeError, OSError) as error:
            refused = error
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise no_descriptors("memory cannot be shared") from error
    path = f"{SHARED_MEMORY}/torchestra-{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DistBackendError(
            f"ranks of this host cannot share memory: there is no memfd_create ({refused}), and no file can"
            f" be made in {SHARED_MEMORY} in its place ({error})"
        ) from error
    os.unlink(path)
    return descriptor


def is_sealed(descriptor: int, seals: int) -> bool:
    """Return whether a file has these seals; False where it is of a kind that has none."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        return False


def is_sealable(descriptor: int) -> bool:
    """Return whether a file that :func:`make_memory_file` has made is of the first kind."""
    try:
        return not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    except OSError:
        return False
