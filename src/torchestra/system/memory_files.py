"""Files in memory without a name, which processes of one host share."""

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
    """Return the descriptor of a new, empty file without a name.

    It is made by ``memfd_create`` where the system has that and lets this process call it (gVisor and strict
    seccomp filters may not); otherwise it is one in /dev/shm, mode 0600, which is unlinked at once. Such a
    file cannot be sealed, and only grows to the free space of /dev/shm (64 MB in all in a Docker container).

    Args:
        name: shown in /proc for a file of the first kind.

    Raises:
        DistBackendError: the file can be made in neither way, or no descriptors are left.
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


def no_room(what: str) -> DistBackendError:
    """Return the error for a file of :func:`make_memory_file` in /dev/shm that cannot hold something."""
    return DistBackendError(
        f"{SHARED_MEMORY}, which is used because this system has no memfd_create, has no room for {what};"
        " make it larger (docker run --shm-size)"
    )


def is_sealed(descriptor: int, seals: int) -> bool:
    """Return whether a file has these seals; False for kinds of files that have none."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals == seals
    except OSError:
        return False


def is_sealable(descriptor: int) -> bool:
    """Return whether a file of :func:`make_memory_file` was made by ``memfd_create``."""
    try:
        return not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    except OSError:
        return False
