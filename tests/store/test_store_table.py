"""The table under all stores: who is woken by what."""

from __future__ import annotations

from torchestra.store.table import Table


def test_a_set_wakes_only_the_waits_that_it_completes() -> None:
    """64 ranks that wait for different keys must not all look again at every set."""
    table, woken = Table(), []
    for number in range(64):
        table.add_wait([f"k{number}", "all"], lambda number=number: woken.append(number), values_only=False)
    table.set("k3", b"")
    table.set("unrelated", b"")
    assert woken == []
    table.set("all", b"")
    assert woken == [3]
    table.set("k7", b"")
    table.set("k7", b"again")
    assert woken == [3, 7]


def test_a_key_deleted_before_the_others_come_is_waited_for_again() -> None:
    table, woken = Table(), []
    table.add_wait(["a", "b"], lambda: woken.append(table.get("a")), values_only=True)
    table.set("a", b"1")
    table.delete("a")
    table.set("b", b"2")
    assert woken == []
    table.set("a", b"3")
    assert woken == [b"3"]


def test_a_cancelled_wait_is_forgotten() -> None:
    table, woken = Table(), []
    waiting = table.add_wait(["a", "b"], lambda: woken.append("park"), values_only=False)
    pop = table.add_pop("q", lambda value: bool(woken.append("pop")))
    table.set("a", b"1")
    for wait in (waiting, pop, waiting, pop):
        table.cancel(wait)
    table.set("b", b"2")
    table.push("q", b"kept")
    assert woken == []
    assert table.pop("q") == b"kept"


def test_who_waited_longest_for_a_queue_is_served_first() -> None:
    table, taken = Table(), []

    def add_wait(number: int) -> None:
        def take(value: bytes) -> bool:
            taken.append((number, value))
            return True

        table.add_pop("q", take)

    for number in range(3):
        add_wait(number)
    for value in (b"a", b"b", b"c", b"d"):
        table.push("q", value)
    assert taken == [(0, b"a"), (1, b"b"), (2, b"c")]
    assert table.queue_len("q") == 1


def test_a_value_that_could_not_be_delivered_goes_before_the_others() -> None:
    table = Table()
    table.push("q", b"second")
    table.push("q", b"first", front=True)
    assert [table.pop("q"), table.pop("q"), table.pop("q")] == [b"first", b"second", None]


def test_a_value_is_not_lost_to_one_who_has_gone() -> None:
    table, taken = Table(), []
    table.add_pop("q", lambda value: False)
    table.add_pop("q", lambda value: not taken.append(value))
    table.push("q", b"1")
    assert taken == [b"1"]
    table.add_pop("q", lambda value: False)
    table.push("q", b"2")
    assert table.pop("q") == b"2"
