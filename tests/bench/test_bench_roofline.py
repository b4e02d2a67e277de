"""The formula of the floor."""

import pytest

from benchmarks.ranks.shapes import OPERATIONS
from benchmarks.roofline import FLOOR_FROM_BYTES, floor_us, traffic

MB = 1 << 20


@pytest.mark.parametrize(
    ("operation", "read", "written"),
    [
        ("all_reduce", 4, 4),
        ("reduce", 4, 1),
        ("broadcast", 1, 3),
        ("all_gather", 4, 16),
        ("gather", 4, 4),
        ("reduce_scatter", 4, 1),
        ("scatter", 1, 1),
        ("all_to_all", 4, 4),
        ("send_recv", 2, 2),
        ("barrier", 0, 0),
    ],
)
def test_every_input_is_read_and_every_output_written_once(operation, read, written):
    moved = traffic(operation, MB, 4)
    assert (moved.read, moved.written) == (read * MB, written * MB)


def test_the_table_of_traffic_knows_every_operation():
    for operation in OPERATIONS:
        assert traffic(operation, 4, 3).read >= 0


def test_the_floor_is_traffic_over_bandwidth():
    # Two ranks read and write 64 MB each, at 64 MB per millisecond.
    assert floor_us("all_reduce", 64 * MB, 2, 64 * MB * 1000) == pytest.approx(4000)


def test_there_is_no_floor_where_caches_may_help_or_nothing_moves():
    assert floor_us("all_reduce", FLOOR_FROM_BYTES // 2, 2, 1e10) is None
    assert floor_us("barrier", 0, 2, 1e10) is None
