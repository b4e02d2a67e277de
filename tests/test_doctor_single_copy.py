"""``torchestra doctor`` says whether ranks can read each other's tensors where they lie, and how fast."""

from __future__ import annotations

import ctypes
import os

import pytest

from torchestra.monitor import doctor

_read_process = doctor._read_process


def found() -> tuple[str, str]:
    (finding,) = [finding for finding in doctor.examine() if finding.subject == "single copy"]
    return finding.found, finding.remark


def test_what_the_system_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_read_process", lambda *_: -1)
    said, remark = found()
    assert said == "no"
    assert "copy long tensors twice: the system refuses process_vm_readv" in remark


@pytest.mark.parametrize(("read_us", "said"), [(124, "yes"), (126, "slower")])
def test_the_times_decide(read_us: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_time_copies", lambda: (read_us / 1e6, 100 / 1e6))
    monkeypatch.setattr(doctor, "_read_process", lambda pid, target, source, length: length)
    assert found()[0] == f"{said}: 1 MiB takes {read_us} µs, two copies 100 µs"


def test_both_ways_are_timed() -> None:
    assert min(doctor._time_copies()) > 0


def test_a_process_reads_memory() -> None:
    source, target = ctypes.create_string_buffer(b"tensor"), ctypes.create_string_buffer(7)
    addresses = ctypes.addressof(target), ctypes.addressof(source)
    assert _read_process(os.getpid(), *addresses, 7) == 7
    assert target.value == b"tensor"
    assert _read_process(os.getpid(), ctypes.addressof(target), 8, 7) == -1  # nothing is mapped there
