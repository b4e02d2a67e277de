"""Who gets which number in a group with joiners, and that what members write is what joiners read."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from torchestra.engine.membership.admission import (
    Admission,
    JoinRequest,
    Offer,
    Terms,
    is_offer,
    offer_key,
)
from torchestra.engine.membership.arena_transfer import make_offer
from torchestra.engine.membership.joiner_detector import JoinerDetector, heartbeat_interval
from torchestra.store import HashStore
from torchestra.store.process import ProcessIdentity


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_survivors_keep_their_numbers_and_nobody_shares_one(data: st.DataObject) -> None:
    members = tuple(sorted(data.draw(st.sets(st.integers(0, 12), min_size=1, max_size=6))))
    survivors = sorted(data.draw(st.sets(st.integers(0, len(members) - 1), min_size=1)))
    wishes = data.draw(st.lists(st.none() | st.integers(0, 14), max_size=5))
    requests = [JoinRequest.new(wish, "native") for wish in wishes]
    terms = Terms("g~1", 1, "", 1.0, "native", None, members)
    offer = Offer.of(terms, survivors, requests)
    assert Offer.decode(offer.encode().encode()) == offer
    assert is_offer(offer.key)
    assert list(offer.members) == sorted(set(offer.members))
    assert offer.size == len(survivors) + len(requests)
    kept = {
        offer.previous[rank]: member for rank, member in enumerate(offer.members) if offer.previous[rank] >= 0
    }
    assert kept == {rank: members[rank] for rank in survivors}
    assert sorted(offer.joiners.values()) == [rank for rank in range(offer.size) if offer.previous[rank] < 0]
    assert sorted([*offer.lost, *survivors]) == list(range(len(members)))
    asked = [
        request for request in requests if request.member is not None and request.member not in kept.values()
    ]
    for wish in {request.member for request in asked}:
        given_to = [
            request for request in asked if request.number in offer.joiners and request.member == wish
        ]
        numbers = [offer.members[offer.joiners[request.number]] for request in given_to]
        # Who comes before in the list may have got it as the lowest that was free.
        assert wish in offer.members
        assert len(set(numbers)) == len(numbers)


def test_no_key_of_a_plain_proposal_is_taken_for_an_offer() -> None:
    for _ in range(20):
        made = make_offer(1, "g", threads=True)
        made.close()
        assert not is_offer(made.key)
    assert not is_offer(b"")


def test_keys_of_earlier_offers_and_of_requests_that_are_used_up_are_removed() -> None:
    store = HashStore()
    admission, request = Admission(store, 5.0), JoinRequest.new(None, "threads")
    for generation in (1, 1, 2, 3):
        admission.ask(request)
        terms = Terms(f"g~{generation}", generation, "", 1.0, "threads", None, (0,))
        offer = Offer.of(terms, [0], [request])
        admission.write(offer)
        admission.invite(offer, 1)
        admission.write_verdict(offer.key, b"committed")
        admission.remove_offers(generation)
        admission.forget(request)
    key = offer.key.hex()
    assert sorted(store.list_keys()) == sorted(["waiting", "offers", f"offer/{key}", f"verdict/{key}"])
    assert store.get("offers").decode() == f"3 {key}\n"


def test_ranks_share_a_host_for_certain_only_if_all_say_the_same_and_can_be_seen() -> None:
    terms = Terms("g~1", 1, "", 1.0, "native", None, (0, 1))
    hosts = ("boot/net", "boot/net", "boot/another")
    here, another, elsewhere = (JoinRequest.new(None, "native", host) for host in hosts)
    unseen = here._replace(process=ProcessIdentity("h", 1, 1, "another"))
    for requests, host, certain in (
        ([here, another], "boot/net", True),
        ([here, elsewhere], "boot/net", False),
        ([another, unseen], "boot/net", False),
        ([JoinRequest.new(None, "native")], "", False),
    ):
        offer = Offer.of(terms, [0, 1], requests, host)
        assert offer.one_host is certain
        assert Offer.decode(offer.encode().encode()) == offer
        assert all(offer.processes[each.number] == each.process for each in requests)


def test_a_verdict_is_waited_for_and_looking_for_it_leaves_no_key() -> None:
    store = HashStore()
    admission, key = Admission(store, 5.0), offer_key()
    assert admission.verdict(key) == admission.verdict(key, 0.01) == b""
    assert store.list_keys() == []
    writer = threading.Timer(0.05, lambda: Admission(store, 5.0).write_verdict(key, b"committed"))
    writer.start()
    assert admission.verdict(key, 30.0) == b"committed"
    writer.join()
    assert admission.verdict(key) == b"committed"


def test_of_a_joiner_that_can_be_seen_heartbeats_are_read_only_now_and_then() -> None:
    store, bound_s = HashStore(), 0.8
    admission = Admission(store, bound_s)
    request, used_up = JoinRequest.new(None, "native"), JoinRequest.new(None, "native")
    admission.ask(request)
    admission.ask(used_up)
    detector = JoinerDetector(admission, [used_up.number])
    store.delete_key(f"heartbeat/{request.number}")
    began = time.monotonic()
    assert detector.waiting() == detector.waiting() == [request]
    if time.monotonic() - began < heartbeat_interval(bound_s) / 2:
        assert not store.check([f"heartbeat/{request.number}"])  # reading what is not there would make it
    while detector.waiting():  # it lives, but says so no more
        assert time.monotonic() < began + 30
        time.sleep(0.01)
    assert time.monotonic() - began > bound_s
    assert detector.lost({request.number: request.process})


def test_of_those_let_in_only_such_are_remembered_as_are_still_on_the_list() -> None:
    admission = Admission(HashStore(), 5.0)
    first, second = JoinRequest.new(None, "native"), JoinRequest.new(None, "native")
    admission.ask(first)
    admission.ask(second)
    detector = JoinerDetector(admission, [first.number, second.number])
    assert detector.waiting() == []
    assert detector.let_in == {first.number, second.number}
    admission.forget(first)
    assert detector.waiting() == []
    assert detector.let_in == {second.number}


def test_what_was_found_a_moment_ago_serves_who_takes_that() -> None:
    admission = Admission(HashStore(), 5.0)
    detector = JoinerDetector(admission)
    assert detector.waiting() == []
    request = JoinRequest.new(None, "native")
    admission.ask(request)
    assert detector.waiting(max_age_s=60.0) == []
    assert detector.waiting() == detector.waiting(max_age_s=60.0) == [request]


def test_many_may_change_the_list_of_those_that_wait_at_once() -> None:
    store, requests = HashStore(), [JoinRequest.new(None, "threads") for _ in range(16)]

    def come(request: JoinRequest) -> None:
        desk = Admission(store, 5.0)
        desk.ask(request)
        if requests.index(request) % 2:
            desk.remove([request.number])

    threads = [threading.Thread(target=come, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(Admission(store, 5.0).waiting()) == set(requests[::2])


def test_a_joiner_that_removes_its_keys_meanwhile_keeps_nobody_waiting() -> None:
    """Between the list of those that wait and their heartbeats it may have been let in."""
    store = HashStore()
    admission = Admission(store, 60.0)
    gone, waits = JoinRequest.new(None, "native"), JoinRequest.new(None, "native")
    admission.ask(gone)
    admission.ask(waits)
    listed = admission.waiting()
    admission.forget(gone)
    found: list[list[bytes]] = []

    reader = threading.Thread(target=lambda: found.append(admission.heartbeats(listed)), daemon=True)
    reader.start()
    reader.join(30)
    assert found == [[b"", b"1"]]
    assert not store.check([f"heartbeat/{gone.number}"])
