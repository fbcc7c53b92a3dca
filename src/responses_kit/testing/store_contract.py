"""The contract of every response store, as checks that you run against your own store.

Each check in `STORE_CONTRACT` is an async function that takes a factory of an async context manager around an empty
store. It raises `AssertionError` with the expectation that failed. The checks need no test framework. With pytest::

    @asynccontextmanager
    async def make_store():
        store = MyStore("sqlite://")
        yield store
        await store.close()

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
    async def test_my_store_fulfils_contract(check):
        await check(make_store)
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final, Literal

import anyio

from ..stores.protocol import Log, Record, ResponseStore

__all__ = ["STORE_CONTRACT", "Check", "MakeStore"]

MakeStore = Callable[[], AbstractAsyncContextManager[ResponseStore]]
"""A factory of async context managers that create an empty store and dispose of it on exit."""

Check = Callable[[MakeStore], Awaitable[None]]
"""One check of the contract."""

_CHAIN_LENGTH = 60
"""The length of a long conversation, in responses."""

_PIECE_COUNT = 300
"""The number of pieces of a long log: more than the first page of a store that reads in pages."""

_RUN_COUNT = 700
"""The number of active runs of a busy process: more than the parameters that some databases accept in a statement."""

_CONCURRENCY = 20
"""The number of concurrent calls in a race."""

_PAST, _NOW, _FUTURE = 1_000.0, 2_000.0, 4_102_444_800.0
"""Times in seconds since the epoch. The checks read no clock: past and future are far away."""

_SPECIAL_TEXTS = ("", "%", "_nn", "a\x00b", "{ann}", "ann:resp", "*[a-z]?", "Ä 日本 😀", "'\";--", "\\n\n", " ann ")
"""Text with a special meaning in some stores, and none in the kit."""

_EVENTS: Final[tuple[Literal["logged", "streamed", "none"], ...]] = ("logged", "streamed", "none")


def _make_record(name: str, *, previous: str | None = None, items: tuple[str, ...] = (), final: bool = True) -> Record:
    return Record(
        id=name,
        previous_id=previous,
        input=f'[{{"type":"message","id":{json.dumps(f"{name}_in")},"content":"né 日本 \\u0000"}}]'.encode(),
        response=f'{{"id":{json.dumps(name)},"output":[]}}'.encode(),
        item_ids=items or (f"{name}_in", f"{name}_out"),
        final=final,
    )


def _make_live_record(name: str, *, lease: float = _FUTURE, key: str | None = None) -> Record:
    return replace(_make_record(name, final=False), events="logged", lease=lease, key=key, fingerprint=f"of {key}")


def _event(number: int) -> bytes:
    """Return the distinct bytes of one event. All events together contain every byte value."""
    return b"data: %d %b\n\n" % (number, bytes(range(256))[number % 256 :][:17])


def _make_log(start: int, count: int = 1) -> Log:
    return Log(start, count, b"".join(map(_event, range(start, start + count))))


def _check_log(pieces: Sequence[Log] | None, end: int, after: int = -1) -> None:
    """Check the pieces that `events` returned for a log of `end` events."""
    assert pieces is not None, f"events after {after} of an existing log is not None"
    if after + 1 >= end:
        assert list(pieces) == [], f"events after {after} of {end} is empty"
        return
    assert pieces, f"events after {after} of {end} is not empty"
    assert pieces[0].start <= after + 1 < pieces[0].end, f"the first piece contains event {after + 1}"
    assert pieces[-1].end == end, f"events after {after} includes the last event"
    for before, following in pairwise(pieces):
        assert following.start == before.end, f"the piece after event {before.end - 1} is contiguous"
    for piece in pieces:
        assert isinstance(piece.data, bytes), "data is of type bytes"
        assert piece == _make_log(piece.start, piece.count), f"the bytes of the events from {piece.start} are unchanged"


async def _call_concurrently(calls: Sequence[Callable[[], Awaitable[object]]]) -> list[object]:
    """Run the calls concurrently and return their results in order."""
    answers: list[object] = [None] * len(calls)

    async def make(number: int) -> None:
        answers[number] = await calls[number]()

    async with anyio.create_task_group() as group:
        for number in range(len(calls)):
            group.start_soon(make, number)
    return answers


async def _create_all(store: ResponseStore, runs: Sequence[tuple[str, Record]]) -> None:
    for first in range(0, len(runs), _CONCURRENCY):
        await _call_concurrently([partial(store.create, *run) for run in runs[first : first + _CONCURRENCY]])


async def get_returns_equal_record(make_store: MakeStore) -> None:
    """Check that `get` returns a record with equal bytes, item ids in order, and unchanged nulls."""
    records = [
        _make_record("resp_1"),
        _make_record("resp_2", previous="resp_1", final=False),
        replace(_make_record("resp_3"), input=b"[]", item_ids=()),
        replace(_make_record("resp_4"), response=b'{"text":"' + b"x" * 1_000_000 + b'"}'),
        replace(_make_record("resp_5"), item_ids=tuple(f"msg_{number:04}" for number in reversed(range(500)))),
        replace(_make_record("resp_odd"), previous_id="resp_\x00{}", item_ids=_SPECIAL_TEXTS),
        replace(_make_record("resp_6"), cancelled=True, key="key 日本 :{}%", fingerprint="sha256:0f"),
        replace(_make_record("resp_7", final=False), request=b'{"model":"m"} \x00\xff\r\n' + b"x" * 100_000),
    ]
    records += [replace(_make_record(f"resp_{events}"), events=events) for events in _EVENTS]
    for number, lease in enumerate((0.0, 0.1, 1 / 3, 1_700_000_000.1234567, _FUTURE + 1e-6, 1e300)):
        records.append(replace(_make_record(f"resp_lease_{number}", final=False), lease=lease))
    async with make_store() as store:
        for record in records:
            assert await store.create("ann", record) is None, f"create of {record.id} returns None"
        for record in records:
            saved = await store.get("ann", record.id)
            assert saved == record, f"get of {record.id} equals the created record"
            assert isinstance(saved.input, bytes), "input is of type bytes"
            assert isinstance(saved.response, bytes), "response is of type bytes"
            assert isinstance(saved.request, bytes), "request is of type bytes"
        odd = next(record for record in records if record.item_ids == _SPECIAL_TEXTS)
        assert await store.items("ann", _SPECIAL_TEXTS) == dict.fromkeys(_SPECIAL_TEXTS, odd), "any text is an item id"


async def unknown_ids_return_nothing(make_store: MakeStore) -> None:
    """Check that every method returns None, False or an empty result for unknown ids."""
    async with make_store() as store:
        await store.create("ann", _make_record("resp_1"))
        others = ("resp_2", "resp_", "resp_1 ", "RESP_1", "resp_1\x00", "*", "' OR '1'='1", "x" * 1000)
        for unknown in (*others, *_SPECIAL_TEXTS):
            assert await store.get("ann", unknown) is None, f"get of {unknown!r} is None"
            assert await store.chain("ann", unknown) == [], f"chain of {unknown!r} is empty"
            assert not await store.items("ann", [unknown]), f"items of {unknown!r} is empty"
            assert await store.update("ann", _make_record(unknown)) is False, f"update of {unknown!r} is False"
            assert await store.update("ann", _make_live_record(unknown), _make_log(0)) is False, (
                f"update of {unknown!r} is False"
            )
            assert await store.delete("ann", unknown) is False, f"delete of {unknown!r} is False"
            assert await store.append("ann", unknown, _make_log(0)) is False, f"append to {unknown!r} is False"
            assert await store.events("ann", unknown, -1) is None, f"events of {unknown!r} is None"
            assert await store.cancel("ann", unknown, _FUTURE) is False, f"cancel of {unknown!r} is False"
            assert await store.renew([("ann", unknown)], _FUTURE) == set(), f"renew of {unknown!r} is empty"
            assert await store.get("ann", unknown) is None, f"a rejected write to {unknown!r} saves nothing"
        assert await store.items("ann", []) == {}, "items of no ids is empty"
        assert await store.renew([]) == set(), "renew of no runs is empty"
        assert await store.renew([], _FUTURE) == set(), "renew of no runs is empty"
        assert await store.get("ann", "resp_1") == _make_record("resp_1"), "the known record is unchanged"


async def update_replaces_record(make_store: MakeStore) -> None:
    """Check that `update` returns True and replaces the whole record, including its item ids."""
    async with make_store() as store:
        await store.create("ann", _make_record("resp_1", items=("in_1", "old"), final=False))
        final = replace(_make_record("resp_1", items=("in_1", "out_1")), response=b'{"status":"completed"}')
        assert await store.update("ann", final) is True, "update of an existing record is True"
        assert await store.get("ann", "resp_1") == final, "get returns the updated record"
        assert await store.chain("ann", "resp_1") == [final], "chain returns the updated record"
        assert await store.items("ann", ["in_1", "out_1"]) == {"in_1": final, "out_1": final}, (
            "items returns the updated record"
        )
        assert not await store.items("ann", ["old"]), "an item id that update removed is unknown"
        waiting = replace(_make_live_record("resp_2", lease=0.1), request=b'{"a":1}', events="none")
        working = replace(_make_live_record("resp_2", lease=1 / 3), request=b"", cancelled=True, events="streamed")
        await store.create("ann", waiting)
        assert await store.update("ann", working) is True, "update of a record that is not final is True"
        assert await store.get("ann", "resp_2") == working, "request, events, lease and cancelled are replaced"
        assert await store.update("ann", waiting) is True, "a record that is not final can be updated again"


async def final_record_never_changes(make_store: MakeStore) -> None:
    """Check that `update`, `append` and `cancel` return False for a final record and change nothing."""
    ended = replace(_make_record("resp_ended"), events="logged", lease=_PAST)
    born = _make_record("resp_born")
    async with make_store() as store:
        await store.create("ann", _make_live_record("resp_ended"))
        assert await store.append("ann", "resp_ended", _make_log(0, 2)) is True, "append to a live record is True"
        assert await store.update("ann", replace(ended, key=None), _make_log(2)) is True, "a final update is True"
        ended = replace(ended, fingerprint=_make_live_record("").fingerprint)
        await store.create("ann", born)
        for final, end in ((ended, 3), (born, 0)):
            for late in (replace(final, response=b"{}", item_ids=("late",)), _make_live_record(final.id)):
                assert await store.update("ann", late) is False, "update of a final record is False"
                assert await store.update("ann", late, _make_log(end)) is False, "update of a final record is False"
            assert await store.append("ann", final.id, _make_log(end)) is False, "append to a final record is False"
            assert await store.cancel("ann", final.id, 0.0) is False, "cancel of a final record is False"
            assert await store.renew([("ann", final.id)], _FUTURE) == set(), "a final record is not renewed"
            assert await store.get("ann", final.id) == final, "a final record never changes"
            assert set(await store.items("ann", ["late", *final.item_ids])) == set(final.item_ids), (
                "the items of a final record never change"
            )
            _check_log(await store.events("ann", final.id, -1), end)


async def update_preserves_key_and_cancellation(make_store: MakeStore) -> None:
    """Check that `update` cannot reset `cancelled` and never changes `key` or `fingerprint`."""
    async with make_store() as store:
        first = _make_live_record("resp_1", key="k1")
        await store.create("ann", first)
        assert await store.update("ann", replace(first, key="k2", fingerprint="other")) is True, "update is True"
        assert await store.get("ann", "resp_1") == first, "key and fingerprint are unchanged"
        assert await store.create("ann", _make_live_record("resp_2", key="k2")) is None, "update does not reserve a key"
        assert await store.cancel("ann", "resp_1", _FUTURE) is True, "cancel is True"
        assert await store.update("ann", replace(first, key=None, fingerprint="")) is True, "update is True"
        assert await store.get("ann", "resp_1") == replace(first, cancelled=True), "cancelled is still set"
        final = replace(_make_record("resp_1"), response=b'{"status":"completed"}')
        assert await store.update("ann", final) is True, "update of a cancelled record to final is True"
        final = replace(final, cancelled=True, key="k1", fingerprint=first.fingerprint)
        assert await store.get("ann", "resp_1") == final, "cancelled, key and fingerprint are unchanged"
        assert await store.create("ann", _make_live_record("resp_3", key="k1")) == final, "the key stays reserved"


async def delete_removes_record_items_and_log(make_store: MakeStore) -> None:
    """Check that `delete` removes a record completely and that later writes to it are rejected."""
    async with make_store() as store:
        await store.create("ann", _make_live_record("resp_1"))
        await store.create("ann", _make_record("resp_2", previous="resp_1"))
        assert await store.append("ann", "resp_1", _make_log(0, 3)) is True, "append is True"
        assert await store.delete("ann", "resp_1") is True, "the first delete is True"
        assert await store.delete("ann", "resp_1") is False, "the second delete is False"
        assert await store.update("ann", _make_record("resp_1")) is False, "update after delete is False"
        assert await store.get("ann", "resp_1") is None, "get of a deleted record is None"
        assert not await store.items("ann", ["resp_1_in", "resp_1_out"]), "items of a deleted record is empty"
        assert await store.get("ann", "resp_2") is not None, "a record that continues the deleted one still exists"
        assert await store.events("ann", "resp_1", -1) is None, "events of a deleted record is None"
        assert await store.append("ann", "resp_1", _make_log(3)) is False, "append after delete is False"
        assert await store.append("ann", "resp_1", _make_log(0)) is False, "append after delete is False"
        assert await store.cancel("ann", "resp_1", _FUTURE) is False, "cancel after delete is False"
        assert await store.renew([("ann", "resp_1")], _FUTURE) == set(), "renew of a deleted record is empty"
        assert await store.expired(_FUTURE * 2) == [], "expired excludes a deleted record"
        assert await store.create("ann", _make_live_record("resp_1")) is None, "a deleted record's id can be reused"
        _check_log(await store.events("ann", "resp_1", -1), 0)
        assert await store.append("ann", "resp_1", _make_log(0)) is True, "the log of the new record starts at 0"


async def owners_cannot_access_each_other(make_store: MakeStore) -> None:
    """Check that no owner can read or change the records of another owner."""
    async with make_store() as store:
        record = _make_live_record("resp_1", key="k")
        await store.create("ann", record)
        await store.append("ann", "resp_1", _make_log(0))
        for other_owner in ("bob", "ANN", "ann ", "an", "*", "ann\x00", *_SPECIAL_TEXTS):
            assert await store.get(other_owner, "resp_1") is None, f"get as {other_owner!r} is None"
            assert await store.chain(other_owner, "resp_1") == [], f"chain as {other_owner!r} is empty"
            assert not await store.items(other_owner, ["resp_1_in"]), f"items as {other_owner!r} is empty"
            assert await store.update(other_owner, replace(record, response=b"{}")) is False, "update is False"
            assert await store.update(other_owner, record, _make_log(1)) is False, f"update as {other_owner!r} is False"
            assert await store.delete(other_owner, "resp_1") is False, f"delete as {other_owner!r} is False"
            assert await store.append(other_owner, "resp_1", _make_log(1)) is False, "append as another owner is False"
            assert await store.append(other_owner, "resp_1", _make_log(0)) is False, "append as another owner is False"
            assert await store.events(other_owner, "resp_1", -1) is None, f"events as {other_owner!r} is None"
            assert await store.cancel(other_owner, "resp_1", 0.0) is False, f"cancel as {other_owner!r} is False"
            assert await store.renew([(other_owner, "resp_1")], 0.0) == set(), f"renew as {other_owner!r} is empty"
        assert await store.get("ann", "resp_1") == record, "the owner's record is unchanged"
        _check_log(await store.events("ann", "resp_1", -1), 1)


async def owners_and_ids_do_not_collide(make_store: MakeStore) -> None:
    """Check that owners may be any text and that no two pairs of owner and id collide."""
    pairs = [("", "a:b:c"), ("a", "b:c"), ("a:b", "c"), ("a/b", "c"), ("a", "b/c"), ("a", "{b}:c"), ("a:{b}", "c")]
    pairs += [("a\x00", "c"), ("a", "\x00c"), *((odd, "resp_odd") for odd in _SPECIAL_TEXTS)]
    async with make_store() as store:
        for number, (owner, name) in enumerate(pairs):
            record = replace(_make_live_record(name), item_ids=(f"item_{number}",))
            assert await store.create(owner, record) is None, f"create of {name!r} as {owner!r} is None"
            assert await store.append(owner, name, _make_log(0, number + 1)) is True, (
                f"append to {name!r} as {owner!r} is True"
            )
        for number, (owner, name) in enumerate(pairs):
            saved = await store.get(owner, name)
            assert saved is not None, f"get of {name!r} as {owner!r} is a record"
            assert saved.item_ids == (f"item_{number}",), f"get of {name!r} as {owner!r} is its own record"
            _check_log(await store.events(owner, name, -1), number + 1)
        for number, (owner, name) in enumerate(pairs):
            assert await store.delete(owner, name) is True, f"delete of {name!r} as {owner!r} is True"
            for other_number, (other, other_name) in enumerate(pairs):
                left = await store.get(other, other_name)
                assert (left is not None) == (other_number > number), f"delete as {owner!r} does not affect {other!r}"


async def chain_returns_oldest_first(make_store: MakeStore) -> None:
    """Check that `chain` returns the record and its predecessors, oldest first, and no other records."""
    async with make_store() as store:
        records = [_make_record("resp_0")]
        for number in range(1, _CHAIN_LENGTH):
            records.append(_make_record(f"resp_{number}", previous=f"resp_{number - 1}"))
        branch = _make_record("resp_branch", previous="resp_3")
        for record in (*records, branch, _make_record("resp_lone")):
            await store.create("ann", record)
        assert await store.chain("ann", records[-1].id) == records, "a long chain is complete and in order"
        assert await store.chain("ann", "resp_3") == records[:4], "a chain excludes later records"
        assert await store.chain("ann", "resp_branch") == [*records[:4], branch], "a branch has its own chain"
        assert await store.chain("ann", "resp_0") == records[:1], "the chain of a first record is that record"


async def chain_starts_after_gap(make_store: MakeStore) -> None:
    """Check that a chain starts after a predecessor that was deleted or belongs to another owner."""
    async with make_store() as store:
        for before, after in pairwise([None, "resp_0", "resp_1", "resp_2", "resp_3"]):
            await store.create("ann", _make_record(str(after), previous=before))
        await store.delete("ann", "resp_1")
        chain = await store.chain("ann", "resp_3")
        assert [record.id for record in chain] == ["resp_2", "resp_3"], "the chain starts after the gap"
        assert chain[0].previous_id == "resp_1", "the first record of the chain retains its previous_id"
        await store.create("bob", _make_record("resp_b", previous="resp_0"))
        chain = await store.chain("bob", "resp_b")
        assert [record.id for record in chain] == ["resp_b"], "a chain excludes records of other owners"


async def items_returns_any_record_with_item(make_store: MakeStore) -> None:
    """Check that `items` returns a record for each item that at least one record contains."""
    first = _make_record("resp_1", items=("in_1", "shared"))
    second = _make_record("resp_2", items=("shared", "out_2"))
    for gone, left in ((first, second), (second, first)):
        async with make_store() as store:
            await store.create("ann", first)
            await store.create("ann", replace(second, item_ids=("shared",), final=False))
            assert await store.update("ann", second) is True, "update of the second record is True"
            found = await store.items("ann", {"in_1", "out_2", "unknown"})
            assert found == {"in_1": first, "out_2": second}, "items returns the record of each known item"
            await store.delete("ann", gone.id)
            found = await store.items("ann", ["shared"])
            assert found == {"shared": left}, f"items returns {left.id} after {gone.id} is deleted"
            await store.delete("ann", left.id)
            assert not await store.items("ann", ["shared"]), "an item without a record is unknown"


async def overlapping_calls_do_not_mix(make_store: MakeStore) -> None:
    """Check that overlapping calls do not affect each other."""
    async with make_store() as store:

        async def use_record(number: int) -> None:
            name, owner = f"resp_{number}", f"owner_{number % 3}"
            await store.create(owner, _make_record(name, final=False))
            for start in range(3):
                assert await store.append(owner, name, _make_log(start)) is True, f"append to {name} is True"
            _check_log(await store.events(owner, name, -1), 3)
            assert await store.update(owner, _make_record(name)) is True, f"update of {name} is True"
            assert await store.get(owner, name) == _make_record(name), f"get of {name} returns the updated record"
            if number % 2:
                assert await store.delete(owner, name) is True, f"delete of {name} is True"

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(use_record, number)
        for number in range(30):
            saved = await store.get(f"owner_{number % 3}", f"resp_{number}")
            assert (saved is None) == bool(number % 2), f"resp_{number} exists only if it was not deleted"


async def create_returns_record_with_same_key(make_store: MakeStore) -> None:
    """Check that `create` returns the existing record with the same key and saves nothing."""
    async with make_store() as store:
        first = _make_live_record("resp_1", key="k")
        assert await store.create("ann", first) is None, "create with a new key is None"
        again = _make_live_record("resp_2", key="k")
        assert await store.create("ann", again) == first, "create with a used key returns its record"
        assert await store.find("ann", "k") == first, "find returns the record with the key"
        assert await store.find("ann", "resp_1") is None, "find does not accept an id"
        assert await store.find("bob", "k") is None, "find as another owner is None"
        assert await store.get("ann", "resp_2") is None, "create with a used key saves no record"
        assert not await store.items("ann", again.item_ids), "create with a used key saves no items"
        assert await store.expired(_FUTURE * 2) == [("ann", first)], "create with a used key saves no lease"
        assert await store.create("bob", replace(again, id="resp_b")) is None, "owners may use the same key"
        for number, other in enumerate(("K", "k ", "resp_1", *_SPECIAL_TEXTS[1:], "k" * 200)):
            record = _make_live_record(f"resp_other_{number}", key=other)
            assert await store.create("ann", record) is None, f"create with key {other!r} is None"
            assert await store.create("ann", replace(record, id="resp_2")) == record, (
                f"create with used key {other!r} returns its record"
            )
        for name in ("resp_none_1", "resp_none_2"):
            assert await store.create("ann", _make_live_record(name)) is None, "create without a key is None"
        await store.cancel("ann", "resp_1", _PAST)
        now = replace(first, cancelled=True, lease=_PAST)
        assert await store.create("ann", again) == now, "create returns the current state of the record"
        assert await store.update("ann", replace(now, final=True, response=b"{}")) is True, "update is True"
        now = replace(now, final=True, response=b"{}")
        assert await store.create("ann", again) == now, "a final record retains its key"
        assert await store.delete("ann", "resp_1") is True, "delete is True"
        assert await store.find("ann", "k") is None, "find of a deleted record is None"
        assert await store.create("ann", again) is None, "the key of a deleted record can be reused"
        assert await store.create("ann", first) == again, "create returns the new record with the key"
        for owner, key in (("a", "b:c"), ("a:b", "c"), ("a", "{b}:c"), ("a:{b}", "c"), ("a\x00b", "c"), ("", "a:b:c")):
            record = _make_live_record(f"resp_{len(owner)}_{len(key)}", key=key)
            assert await store.create(owner, record) is None, f"key {key!r} of {owner!r} does not collide"


async def concurrent_creates_save_one_record(make_store: MakeStore) -> None:
    """Check that one of several concurrent creates with the same key wins and all return its record."""
    async with make_store() as store:
        for turn in range(3):
            records = [_make_live_record(f"resp_{turn}_{number}", key=f"k{turn}") for number in range(_CONCURRENCY)]
            answers = await _call_concurrently([partial(store.create, "ann", record) for record in records])
            assert answers.count(None) == 1, "exactly one create is None"
            winner = records[answers.index(None)]
            assert all(answer in (None, winner) for answer in answers), "the other creates return the winner's record"
            for record in records:
                saved = await store.get("ann", record.id)
                assert saved == (winner if record is winner else None), "only the winner's record is saved"


async def append_requires_contiguous_log(make_store: MakeStore) -> None:
    """Check that `append` returns False and saves nothing unless it continues the log."""
    async with make_store() as store:
        await store.create("ann", _make_live_record("resp_1"))
        _check_log(await store.events("ann", "resp_1", -1), 0)
        assert await store.append("ann", "resp_1", _make_log(1)) is False, "append at 1 to an empty log is False"
        _check_log(await store.events("ann", "resp_1", -1), 0)
        assert await store.append("ann", "resp_1", _make_log(0, 3)) is True, "append to an empty log is True"
        for start, count in ((0, 3), (0, 4), (2, 1), (2, 2), (4, 1), (300, 1)):
            assert await store.append("ann", "resp_1", _make_log(start, count)) is False, f"append at {start} is False"
            _check_log(await store.events("ann", "resp_1", -1), 3)
        assert await store.append("ann", "resp_1", _make_log(3)) is True, "append at the end of the log is True"
        assert await store.cancel("ann", "resp_1", _PAST) is True, "cancel is True"
        assert await store.append("ann", "resp_1", _make_log(4, 2)) is True, "append to a cancelled record is True"
        _check_log(await store.events("ann", "resp_1", -1), 6)
        assert await store.get("ann", "resp_1") == replace(_make_live_record("resp_1", lease=_PAST), cancelled=True), (
            "append does not change the record"
        )


async def events_returns_events_after_number(make_store: MakeStore) -> None:
    """Check that `events` returns all events after a number, in order and with unchanged bytes."""
    async with make_store() as store:
        await store.create("ann", _make_live_record("resp_1"))
        end = 0
        for number in range(_PIECE_COUNT):
            piece = _make_log(end, number % 5 + 1)
            assert await store.append("ann", "resp_1", piece) is True, f"append at {end} is True"
            end = piece.end
            _check_log(await store.events("ann", "resp_1", piece.start - 1), end, piece.start - 1)
        for after in (-1, 0, 1, 2, 3, 100, 101, 102, 103, 104, end // 2, end - 3, end - 2, end - 1, end, end + 1000):
            _check_log(await store.events("ann", "resp_1", after), end, after)
        assert await store.update("ann", replace(_make_record("resp_1"), events="logged")) is True, "update is True"
        _check_log(await store.events("ann", "resp_1", end // 3), end, end // 3)
        large = Log(0, 1, bytes(range(256)) * 4000)
        await store.create("ann", _make_live_record("resp_2"))
        assert await store.append("ann", "resp_2", large) is True, "append of a large piece is True"
        assert list(await store.events("ann", "resp_2", -1) or ()) == [large], "events returns a large piece unchanged"


async def update_saves_record_and_log_atomically(make_store: MakeStore) -> None:
    """Check that `update` saves both record and log, or neither if the log is not contiguous."""
    async with make_store() as store:
        first = _make_live_record("resp_1")
        await store.create("ann", first)
        second, final = replace(first, response=b"{2}", item_ids=("2",)), replace(first, response=b"{3}", final=True)
        assert await store.update("ann", second, _make_log(0, 2)) is True, "update with a log is True"
        assert await store.get("ann", "resp_1") == second, "the record is replaced"
        _check_log(await store.events("ann", "resp_1", -1), 2)
        for start in (0, 1, 3, 200):
            assert await store.update("ann", final, _make_log(start)) is False, f"update at {start} of 2 is False"
            assert await store.get("ann", "resp_1") == second, "a rejected update does not change the record"
            assert set(await store.items("ann", ["2", *final.item_ids])) == {"2"}, (
                "a rejected update does not change the items"
            )
            _check_log(await store.events("ann", "resp_1", -1), 2)
        assert await store.append("ann", "resp_1", _make_log(2)) is True, "the record is still not final"
        assert await store.update("ann", replace(second, response=b"{}")) is True, "update without a log is True"
        _check_log(await store.events("ann", "resp_1", -1), 3)
        assert await store.update("ann", final, _make_log(3, 2)) is True, "the final update with events is True"
        assert await store.get("ann", "resp_1") == final, "the record is replaced"
        _check_log(await store.events("ann", "resp_1", -1), 5)


async def concurrent_writes_have_one_winner(make_store: MakeStore) -> None:
    """Check that exactly one of several conflicting writes returns True."""
    async with make_store() as store:
        await store.create("ann", _make_live_record("resp_1"))
        end = 0
        for _ in range(3):
            pieces = [_make_log(end, number % 3 + 1) for number in range(_CONCURRENCY)]
            answers = await _call_concurrently([partial(store.append, "ann", "resp_1", piece) for piece in pieces])
            assert sorted(map(bool, answers)) == [False] * (_CONCURRENCY - 1) + [True], "exactly one append is True"
            end = pieces[answers.index(True)].end
            _check_log(await store.events("ann", "resp_1", -1), end)
        ends = [
            replace(_make_live_record("resp_1"), response=b"{%d}" % number, final=True)
            for number in range(_CONCURRENCY // 2)
        ]
        append = partial(store.append, "ann", "resp_1", _make_log(end, 2))
        updates = [partial(store.update, "ann", record, _make_log(end)) for record in ends]
        answers = await _call_concurrently([*updates, append])
        assert sorted(map(bool, answers)) == [False] * len(ends) + [True], "exactly one of update and append is True"
        winner = answers.index(True)
        saved = await store.get("ann", "resp_1")
        assert saved == [*ends, _make_live_record("resp_1")][winner], "the record is that of the successful write"
        _check_log(await store.events("ann", "resp_1", -1), end + (2 if winner == len(ends) else 1))
        await store.create("ann", _make_live_record("resp_2"))
        ends = [replace(record, id="resp_2") for record in ends]
        answers = await _call_concurrently([partial(store.update, "ann", record) for record in ends])
        assert sorted(map(bool, answers)) == [False] * (len(ends) - 1) + [True], "exactly one final update is True"
        saved = await store.get("ann", "resp_2")
        assert saved == ends[answers.index(True)], "the record is that of the update that returned True"


async def cancel_marks_unfinished_record(make_store: MakeStore) -> None:
    """Check that `cancel` sets `cancelled`, shortens the lease to `until`, and changes nothing else."""
    async with make_store() as store:
        record = _make_live_record("resp_1", lease=_NOW, key="k")
        await store.create("ann", record)
        await store.create("ann", _make_live_record("resp_2"))
        cancelled = replace(record, cancelled=True)
        for until, lease in ((_FUTURE, _NOW), (_PAST + 1 / 3, _PAST + 1 / 3), (_NOW, _PAST + 1 / 3), (_PAST, _PAST)):
            assert await store.cancel("ann", "resp_1", until) is True, "cancel of a record that is not final is True"
            assert await store.get("ann", "resp_1") == replace(cancelled, lease=lease), "cancel never extends the lease"
        found = await store.items("ann", ["resp_1_in"])
        assert found == {"resp_1_in": replace(cancelled, lease=_PAST)}, "items returns the current state of the record"
        assert await store.get("ann", "resp_2") == _make_live_record("resp_2"), "cancel does not affect other records"


async def cancel_and_update_agree(make_store: MakeStore) -> None:
    """Check that `cancel` racing with the final update returns True only if it set `cancelled`."""
    async with make_store() as store:
        for number in range(_CONCURRENCY):
            record = _make_live_record(f"resp_{number}")
            await store.create("ann", record)
            end = partial(store.update, "ann", replace(record, final=True), _make_log(0))
            cancel = partial(store.cancel, "ann", record.id, _PAST)
            answers = await _call_concurrently([end, cancel] if number % 2 else [cancel, end])
            has_ended, is_cancelled = answers if number % 2 else reversed(answers)
            assert has_ended is True, "update of a cancelled record to final is True"
            saved = await store.get("ann", record.id)
            assert saved == replace(record, final=True, cancelled=is_cancelled is True), "cancelled is cancel's result"
            _check_log(await store.events("ann", record.id, -1), 1)


async def renew_returns_active_runs(make_store: MakeStore) -> None:
    """Check that `renew` returns and renews only runs that are not final, deleted or cancelled."""
    async with make_store() as store:
        for name in ("live", "ended", "cancelled", "deleted", "other"):
            await store.create("ann", _make_live_record(name, lease=_NOW))
        ended = replace(_make_live_record("ended", lease=_NOW), final=True)
        await store.update("ann", ended)
        await store.cancel("ann", "cancelled", _PAST)
        await store.delete("ann", "deleted")
        for owner in _SPECIAL_TEXTS:
            await store.create(owner, _make_live_record("live", lease=_NOW))
        odd = {(owner, "live") for owner in _SPECIAL_TEXTS}
        foreign = [("bob", "live"), ("ann\x00", "live"), ("an", "nlive"), ("live", "ann")]
        requested = [*foreign, *odd, *(("ann", name) for name in ("live", "ended", "cancelled", "deleted", "unknown"))]
        survivors = {("ann", "live"), *odd}
        assert await store.renew(requested) == survivors, "renew returns the active runs"
        for owner, name in survivors:
            assert await store.get(owner, name) == _make_live_record(name, lease=_NOW), (
                "renew without a time changes no lease"
            )
        until = _FUTURE + 1 / 3
        assert await store.renew(set(requested), until) == survivors, "renew with a time returns the active runs"
        for owner, name in survivors:
            assert await store.get(owner, name) == _make_live_record(name, lease=until), (
                "renew sets the leases to the given time"
            )
        assert await store.get("ann", "ended") == ended, "a final record never changes"
        cancelled = replace(_make_live_record("cancelled", lease=_PAST), cancelled=True)
        assert await store.get("ann", "cancelled") == cancelled, "a cancelled record's lease is not renewed"
        assert await store.get("ann", "other") == _make_live_record("other", lease=_NOW), (
            "renew does not affect other records"
        )


async def renew_accepts_many_runs(make_store: MakeStore) -> None:
    """Check that `renew` accepts as many runs as a busy process can have."""
    async with make_store() as store:
        runs = [
            (f"owner_{number % 3}", _make_live_record(f"resp_{number}", lease=_PAST)) for number in range(_RUN_COUNT)
        ]
        await _create_all(store, runs)
        for owner, record in runs[::7]:
            await store.cancel(owner, record.id, _PAST)
        left = {(owner, record.id) for number, (owner, record) in enumerate(runs) if number % 7}
        requested = [(owner, record.id) for owner, record in runs]
        assert await store.renew(requested) == left, "renew returns all active runs"
        assert await store.renew(requested, _FUTURE) == left, "renew with a time returns all active runs"
        expired = await store.expired(_NOW, limit=_RUN_COUNT)
        assert {(owner, record.id) for owner, record in expired} == set(requested) - left, "expired omits renewed runs"


async def expired_returns_records_with_expired_lease(make_store: MakeStore) -> None:
    """Check that `expired` returns unfinished records of all owners whose lease has expired."""
    async with make_store() as store:
        over = {(owner, "resp_over"): _make_live_record("resp_over", lease=_PAST) for owner in ("ann", *_SPECIAL_TEXTS)}
        over["ann", "resp_never"] = _make_live_record("resp_never", lease=0.0)
        live = [
            _make_live_record("resp_live"),
            _make_live_record("resp_renewed", lease=_PAST),
            _make_live_record("resp_updated", lease=_PAST),
        ]
        ended = [
            replace(_make_live_record("resp_born", lease=_PAST), final=True),
            _make_live_record("resp_ended", lease=_PAST),
        ]
        cancelled = [_make_live_record("resp_cancelled")]
        assert await store.expired(_NOW) == [], "expired of an empty store is empty"
        await _create_all(store, [(owner, record) for (owner, _), record in over.items()])
        await _create_all(store, [("ann", record) for record in (*live, *ended, *cancelled)])
        await store.renew([("ann", "resp_renewed")], _FUTURE)
        await store.update("ann", replace(live[-1], lease=_FUTURE))
        await store.update("ann", replace(ended[-1], final=True))
        await store.cancel("ann", "resp_cancelled", _PAST)
        over["ann", "resp_cancelled"] = replace(cancelled[0], lease=_PAST, cancelled=True)
        for _ in range(2):
            found = await store.expired(_NOW)
            assert len(found) == len(over), "expired returns each record once"
            assert {(owner, record.id): record for owner, record in found} == over, (
                "expired returns the saved owners and records"
            )
        while over:
            found = await store.expired(_NOW, limit=3)
            assert len(found) == min(3, len(over)), "expired returns records up to the limit"
            for owner, record in found:
                assert over.pop((owner, record.id)) == record, "expired excludes final records"
                assert await store.update(owner, replace(record, final=True)) is True, "its final update is True"
        assert await store.expired(_NOW) == [], "expired is empty when all records are final"
        found = await store.expired(_FUTURE * 2)
        assert {record.id for _, record in found} == {record.id for record in live}, (
            "expired returns live records at a later time"
        )


async def prune_preserves_recent_records(make_store: MakeStore) -> None:
    """Check that `prune` returns the number of removed records and removes no live or recent record."""
    async with make_store() as store:
        assert await store.prune() == 0, "prune of an empty store is 0"
        live, final = _make_live_record("resp_live", key="k"), replace(_make_record("resp_final"), events="logged")
        await store.create("ann", live)
        await store.append("ann", live.id, _make_log(0, 2))
        await store.create("ann", final)
        gone = await store.prune()
        assert isinstance(gone, int), "prune returns an integer"
        assert gone == 0, "prune removes no recent record"
        assert await store.get("ann", live.id) == live, "the live record still exists"
        assert await store.get("ann", final.id) == final, "the final record still exists"
        _check_log(await store.events("ann", live.id, -1), 2)
        assert await store.append("ann", live.id, _make_log(2)) is True, "append to the live record is True"
        assert await store.create("ann", _make_live_record("resp_new", key="k")) == live, (
            "create returns the live record with the key"
        )


STORE_CONTRACT: Final[tuple[Check, ...]] = (
    get_returns_equal_record,
    unknown_ids_return_nothing,
    update_replaces_record,
    final_record_never_changes,
    update_preserves_key_and_cancellation,
    delete_removes_record_items_and_log,
    owners_cannot_access_each_other,
    owners_and_ids_do_not_collide,
    chain_returns_oldest_first,
    chain_starts_after_gap,
    items_returns_any_record_with_item,
    create_returns_record_with_same_key,
    concurrent_creates_save_one_record,
    append_requires_contiguous_log,
    events_returns_events_after_number,
    update_saves_record_and_log_atomically,
    concurrent_writes_have_one_winner,
    cancel_marks_unfinished_record,
    cancel_and_update_agree,
    renew_returns_active_runs,
    renew_accepts_many_runs,
    expired_returns_records_with_expired_lease,
    prune_preserves_recent_records,
    overlapping_calls_do_not_mix,
)
"""The checks of the contract. Each needs its own empty store."""
