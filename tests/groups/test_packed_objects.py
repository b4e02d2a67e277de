"""Objects as bytes: what comes back, what is copied, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchestra.tensors.packed_objects import PackedObjects, Unreadable


def there_and_back(*objects: object) -> list[Any]:
    """As if sent and received, piece by piece."""
    own = PackedObjects.of(objects)
    packed, head = PackedObjects.arriving(own.block())
    assert head.buffers == len(own.buffers)
    packed.rest.copy_(own.rest)
    for target, source in zip(packed.expect_buffers(), own.buffers, strict=True):
        target.copy_(source)
    return packed.objects()


def same(found: object, given: object) -> bool:
    if isinstance(given, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, given)
    if isinstance(given, np.ndarray):
        return isinstance(found, np.ndarray) and np.array_equal(found, given)
    return found == given


@pytest.mark.parametrize("length", [0, 1, 100, 7, 900, 992 - 32, 5000, 200_000])
def test_objects_of_any_size(length: int) -> None:
    for item in (b"x" * length, "ä" * length, list(range(length)), torch.arange(length), np.arange(length)):
        (found,) = there_and_back(item)
        assert same(found, item)


def test_several_objects_and_none() -> None:
    given = [None, {"a": [1, 2]}, torch.ones(20_000), "text", np.ones(20_000), torch.zeros(0)]
    found = there_and_back(*given)
    assert all(same(one, other) for one, other in zip(found, given, strict=True))
    assert there_and_back() == []


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.float8_e5m2]
)
@pytest.mark.parametrize("length", [0, 3, 100_000])
def test_tensors_keep_dtype_shape_strides_and_class(dtype: torch.dtype, length: int) -> None:
    tensor = torch.arange(2 * length).reshape(2, length).to(dtype).t()
    tensor.remark = "an attribute"
    (found,) = there_and_back(tensor)
    assert found.remark == "an attribute"
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
    assert torch.equal(
        *(torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in (found, tensor))
    )
    if dtype.is_floating_point:
        parameter = torch.nn.Parameter(tensor)
        (found,) = there_and_back(parameter)
        assert isinstance(found, torch.nn.Parameter)
        assert found.requires_grad


def test_a_module_with_its_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.BatchNorm1d(200))
    (found,) = there_and_back(module)
    for name, value in module.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)
    found(torch.ones(2, 100)).sum().backward()


def test_sparse_and_quantized_tensors() -> None:
    (found,) = there_and_back(torch.eye(200).to_sparse())
    assert torch.equal(found.to_dense(), torch.eye(200))


@pytest.mark.parametrize("length", [3, 100_000])
def test_tensors_that_share_memory_share_it_again(length: int) -> None:
    tensor = torch.arange(length)
    (found,) = there_and_back({"whole": tensor, "part": tensor[1:], "again": tensor})
    found["whole"][1] = 77
    assert found["part"][0] == 77
    assert found["again"] is found["whole"]
    for each in (found["whole"], tensor):
        each.resize_(2 * length)  # as it could be before


@pytest.mark.parametrize("large", [torch.ones(100_000), np.ones(100_000)])
def test_large_memory_is_not_copied_when_packed(large: Any) -> None:
    packed = PackedObjects.of([large, "and more"])
    (buffer,) = packed.buffers
    address = large.data_ptr() if isinstance(large, torch.Tensor) else large.ctypes.data
    assert buffer.data_ptr() == address
    assert len(packed.stream) < 1000
    (found, _) = there_and_back(large, "and more")
    found[0] = 5  # may be written to
    assert found[1] == 1


def test_large_memory_is_not_copied_when_unpacked() -> None:
    own = PackedObjects.of([torch.ones(100_000), np.ones(100_000)])
    packed, _ = PackedObjects.arriving(own.block())
    packed.rest.copy_(own.rest)
    targets = packed.expect_buffers()
    tensor, array = packed.objects()
    assert tensor.data_ptr() == targets[0].data_ptr()
    assert array.ctypes.data == targets[1].data_ptr()


def test_small_tensors_cost_no_buffers() -> None:
    packed = PackedObjects.of([[torch.ones(10) for _ in range(50)]])
    assert packed.buffers == []
    assert PackedObjects.of([torch.ones(4)]).rest.numel() == 0


def test_an_array_that_must_not_be_written_stays_so() -> None:
    array = np.ones(100_000)
    array.flags.writeable = False
    (found,) = there_and_back(array)
    assert np.array_equal(found, array)
    assert not found.flags.writeable


class Explosive:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_one_object_that_cannot_be_unpickled_does_not_take_the_others() -> None:
    first, second, third = there_and_back(torch.ones(50_000), [Explosive(), torch.ones(50_000)], "last")
    assert torch.equal(first, torch.ones(50_000))
    assert isinstance(second, Unreadable)
    assert "not a number" in str(second.error)
    assert third == "last"


def test_a_failure_says_why_however_long_that_is() -> None:
    for text in ("short", "ü" * 5000, ""):
        packed, head = PackedObjects.arriving(PackedObjects.failure(ValueError(text)).block())
        assert head.failed
        assert packed.failed
        assert packed.reason.startswith(f"ValueError: {text[:100]}")
        assert packed.rest.numel() == 0
