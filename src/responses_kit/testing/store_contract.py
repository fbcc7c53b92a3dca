"""What every store must do, as checks to be run against your own.

Each check in `STORE_CONTRACT` is an async function. It takes a factory of an async context manager around an
empty store, and fails with an `AssertionError` that says what is wrong. Needs no test framework; with pytest::

    @asynccontextmanager
    async def make_store():
        store = MyStore("sqlite://")
        yield store
        await store.close()

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
    async def test_my_store_keeps_the_contract(check):
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
"""Makes an empty store, and clears it away at the end."""

Check = Callable[[MakeStore], Awaitable[None]]
"""One clause of the contract."""

_CHAIN = 60
"""Responses of a conversation that is long, but no longer than people's are."""

_PIECES = 300
"""Pieces of a log: more than a store that reads by pages may have on its first page."""

_RUNS = 700
"""Runs that a busy process is at work on: more than some databases take parameters in one statement."""

_AT_ONCE = 20
"""Calls that overlap where they race."""

_PAST, _NOW, _FUTURE = 1_000.0, 2_000.0, 4_102_444_800.0
"""Seconds since the epoch. The contract has no clock: what is over, is over for long."""

_ODD = ("", "%", "_nn", "a\x00b", "{ann}", "ann:resp", "*[a-z]?", "Ä 日本 😀", "'\";--", "\\n\n", " ann ")
"""Text that means something to one store or another, and nothing to the kit."""

_EVENTS: Final[tuple[Literal["logged", "streamed", "none"], ...]] = ("logged", "streamed", "none")


def _record(name: str, *, previous: str | None = None, items: tuple[str, ...] = (), final: bool = True) -> Record:
    return Record(
        id=name,
        previous_id=previous,
        input=f'[{{"type":"message","id":{json.dumps(f"{name}_in")},"content":"né 日本 \\u0000"}}]'.encode(),
        response=f'{{"id":{json.dumps(name)},"output":[]}}'.encode(),
        item_ids=items or (f"{name}_in", f"{name}_out"),
        final=final,
    )


def _live(name: str, *, lease: float = _FUTURE, key: str | None = None) -> Record:
    return replace(_record(name, final=False), events="logged", lease=lease, key=key, fingerprint=f"of {key}")


def _event(number: int) -> bytes:
    """One event's bytes, which tell it from any other; every byte value is in some."""
    return b"data: %d %b\n\n" % (number, bytes(range(256))[number % 256 :][:17])


def _log(start: int, count: int = 1) -> Log:
    return Log(start, count, b"".join(map(_event, range(start, start + count))))


def _check_log(pieces: Sequence[Log] | None, end: int, after: int = -1) -> None:
    """Checks what `events` gave for a log of `end` events, in whatever pieces."""
    assert pieces is not None, f"events after {after} are known while the log is kept"
    if after + 1 >= end:
        assert list(pieces) == [], f"events after {after} of {end} are none"
        return
    assert pieces, f"events after {after} of {end} are some"
    assert pieces[0].start <= after + 1 < pieces[0].end, f"the first piece holds what comes next after {after}"
    assert pieces[-1].end == end, f"events after {after} are all that was appended"
    for before, following in pairwise(pieces):
        assert following.start == before.end, f"no event is missing, twice or out of order after {before.end - 1}"
    for piece in pieces:
        assert isinstance(piece.data, bytes), "data is bytes"
        assert piece == _log(piece.start, piece.count), f"events from {piece.start} on are bytes for bytes the same"


async def _together(calls: Sequence[Callable[[], Awaitable[object]]]) -> list[object]:
    """What each call gives, all made at once."""
    answers: list[object] = [None] * len(calls)

    async def make(number: int) -> None:
        answers[number] = await calls[number]()

    async with anyio.create_task_group() as group:
        for number in range(len(calls)):
            group.start_soon(make, number)
    return answers


async def _create_all(store: ResponseStore, runs: Sequence[tuple[str, Record]]) -> None:
    for first in range(0, len(runs), _AT_ONCE):
        await _together([partial(store.create, *run) for run in runs[first : first + _AT_ONCE]])


async def keeps_what_it_was_given(make_store: MakeStore) -> None:
    """`get` returns an equal record: bytes for bytes, item ids in order, nulls as nulls."""
    records = [
        _record("resp_1"),
        _record("resp_2", previous="resp_1", final=False),
        replace(_record("resp_3"), input=b"[]", item_ids=()),
        replace(_record("resp_4"), response=b'{"text":"' + b"x" * 1_000_000 + b'"}'),
        replace(_record("resp_5"), item_ids=tuple(f"msg_{number:04}" for number in reversed(range(500)))),
        replace(_record("resp_odd"), previous_id="resp_\x00{}", item_ids=_ODD),
        replace(_record("resp_6"), cancelled=True, key="key 日本 :{}%", fingerprint="sha256:0f"),
        replace(_record("resp_7", final=False), request=b'{"model":"m"} \x00\xff\r\n' + b"x" * 100_000),
    ]
    records += [replace(_record(f"resp_{events}"), events=events) for events in _EVENTS]
    for number, lease in enumerate((0.0, 0.1, 1 / 3, 1_700_000_000.1234567, _FUTURE + 1e-6, 1e300)):
        records.append(replace(_record(f"resp_lease_{number}", final=False), lease=lease))
    async with make_store() as store:
        for record in records:
            assert await store.create("ann", record) is None, f"create of {record.id} is None"
        for record in records:
            kept = await store.get("ann", record.id)
            assert kept == record, f"get of {record.id} differs from what was created"
            assert isinstance(kept.input, bytes), "input is bytes"
            assert isinstance(kept.response, bytes), "response is bytes"
            assert isinstance(kept.request, bytes), "request is bytes"
        odd = next(record for record in records if record.item_ids == _ODD)
        assert await store.items("ann", _ODD) == dict.fromkeys(_ODD, odd), "any text is an item's id"


async def knows_nothing_of_unknown_ids(make_store: MakeStore) -> None:
    """Unknown ids are None, False or empty, never an exception."""
    async with make_store() as store:
        await store.create("ann", _record("resp_1"))
        others = ("resp_2", "resp_", "resp_1 ", "RESP_1", "resp_1\x00", "*", "' OR '1'='1", "x" * 1000)
        for unknown in (*others, *_ODD):
            assert await store.get("ann", unknown) is None, f"get of {unknown!r} is None"
            assert await store.chain("ann", unknown) == [], f"chain of {unknown!r} is empty"
            assert not await store.items("ann", [unknown]), f"items of {unknown!r} is empty"
            assert await store.update("ann", _record(unknown)) is False, f"update of {unknown!r} is False"
            assert await store.update("ann", _live(unknown), _log(0)) is False, f"update of {unknown!r} is False"
            assert await store.delete("ann", unknown) is False, f"delete of {unknown!r} is False"
            assert await store.append("ann", unknown, _log(0)) is False, f"append to {unknown!r} is False"
            assert await store.events("ann", unknown, -1) is None, f"events of {unknown!r} is None"
            assert await store.cancel("ann", unknown, _FUTURE) is False, f"cancel of {unknown!r} is False"
            assert await store.renew([("ann", unknown)], _FUTURE) == set(), f"renew of {unknown!r} is empty"
            assert await store.get("ann", unknown) is None, f"what is refused of {unknown!r} is not kept"
        assert await store.items("ann", []) == {}, "items of nothing is empty"
        assert await store.renew([]) == set(), "renew of nothing is empty"
        assert await store.renew([], _FUTURE) == set(), "renew of nothing is empty"
        assert await store.get("ann", "resp_1") == _record("resp_1"), "the known record is untouched"


async def replaces_on_update(make_store: MakeStore) -> None:
    """`update` returns True and replaces all of the record, its item ids included."""
    async with make_store() as store:
        await store.create("ann", _record("resp_1", items=("in_1", "old"), final=False))
        final = replace(_record("resp_1", items=("in_1", "out_1")), response=b'{"status":"completed"}')
        assert await store.update("ann", final) is True, "update of a kept record is True"
        assert await store.get("ann", "resp_1") == final, "get gives the updated record"
        assert await store.chain("ann", "resp_1") == [final], "chain gives the updated record"
        assert await store.items("ann", ["in_1", "out_1"]) == {"in_1": final, "out_1": final}, "items gives it too"
        assert not await store.items("ann", ["old"]), "an item that the record no longer holds is unknown"
        waiting = replace(_live("resp_2", lease=0.1), request=b'{"a":1}', events="none")
        working = replace(_live("resp_2", lease=1 / 3), request=b"", cancelled=True, events="streamed")
        await store.create("ann", waiting)
        assert await store.update("ann", working) is True, "update of a record that is not final is True"
        assert await store.get("ann", "resp_2") == working, "request, events, lease and cancelled are replaced"
        assert await store.update("ann", waiting) is True, "a record that is not final can be updated again"


async def never_changes_a_final_record(make_store: MakeStore) -> None:
    """Where a record is final, `update`, `append` and `cancel` are False, and all stays as it was."""
    ended = replace(_record("resp_ended"), events="logged", lease=_PAST)
    born = _record("resp_born")
    async with make_store() as store:
        await store.create("ann", _live("resp_ended"))
        assert await store.append("ann", "resp_ended", _log(0, 2)) is True, "append to a live record is True"
        assert await store.update("ann", replace(ended, key=None), _log(2)) is True, "the first end is kept"
        ended = replace(ended, fingerprint=_live("").fingerprint)
        await store.create("ann", born)
        for final, end in ((ended, 3), (born, 0)):
            for late in (replace(final, response=b"{}", item_ids=("late",)), _live(final.id)):
                assert await store.update("ann", late) is False, "update of a final record is False"
                assert await store.update("ann", late, _log(end)) is False, "with a log, too"
            assert await store.append("ann", final.id, _log(end)) is False, "append to a final record is False"
            assert await store.cancel("ann", final.id, 0.0) is False, "cancel of a final record is False"
            assert await store.renew([("ann", final.id)], _FUTURE) == set(), "a final record is not renewed"
            assert await store.get("ann", final.id) == final, "a final record never changes"
            assert set(await store.items("ann", ["late", *final.item_ids])) == set(final.item_ids), "nor its items"
            _check_log(await store.events("ann", final.id, -1), end)


async def keeps_what_an_update_may_not_change(make_store: MakeStore) -> None:
    """`cancelled` stays set, and `key` and `fingerprint` stay, whatever the updated record says."""
    async with make_store() as store:
        first = _live("resp_1", key="k1")
        await store.create("ann", first)
        assert await store.update("ann", replace(first, key="k2", fingerprint="other")) is True, "update is True"
        assert await store.get("ann", "resp_1") == first, "key and fingerprint stay"
        assert await store.create("ann", _live("resp_2", key="k2")) is None, "an update takes no key"
        assert await store.cancel("ann", "resp_1", _FUTURE) is True, "cancel is True"
        assert await store.update("ann", replace(first, key=None, fingerprint="")) is True, "update is True"
        assert await store.get("ann", "resp_1") == replace(first, cancelled=True), "cancelled stays set"
        final = replace(_record("resp_1"), response=b'{"status":"completed"}')
        assert await store.update("ann", final) is True, "a cancelled record can end"
        final = replace(final, cancelled=True, key="k1", fingerprint=first.fingerprint)
        assert await store.get("ann", "resp_1") == final, "all three stay at the end, too"
        assert await store.create("ann", _live("resp_3", key="k1")) == final, "an update frees no key"


async def forgets_on_delete(make_store: MakeStore) -> None:
    """`delete` returns True once; then nothing of the record is known, and a late update keeps nothing."""
    async with make_store() as store:
        await store.create("ann", _live("resp_1"))
        await store.create("ann", _record("resp_2", previous="resp_1"))
        assert await store.append("ann", "resp_1", _log(0, 3)) is True, "append is True"
        assert await store.delete("ann", "resp_1") is True, "the first delete is True"
        assert await store.delete("ann", "resp_1") is False, "the second delete is False"
        assert await store.update("ann", _record("resp_1")) is False, "update after delete is False"
        assert await store.get("ann", "resp_1") is None, "what was deleted is gone"
        assert not await store.items("ann", ["resp_1_in", "resp_1_out"]), "its items are gone too"
        assert await store.get("ann", "resp_2") is not None, "what continued it stays"
        assert await store.events("ann", "resp_1", -1) is None, "its log is gone"
        assert await store.append("ann", "resp_1", _log(3)) is False, "append after delete is False"
        assert await store.append("ann", "resp_1", _log(0)) is False, "append after delete is False"
        assert await store.cancel("ann", "resp_1", _FUTURE) is False, "cancel after delete is False"
        assert await store.renew([("ann", "resp_1")], _FUTURE) == set(), "what was deleted is not renewed"
        assert await store.expired(_FUTURE * 2) == [], "what was deleted does not expire"
        assert await store.create("ann", _live("resp_1")) is None, "its id is free"
        _check_log(await store.events("ann", "resp_1", -1), 0)
        assert await store.append("ann", "resp_1", _log(0)) is True, "a new record's log begins anew"


async def shows_nobody_elses(make_store: MakeStore) -> None:
    """Under another owner every id is unknown, and nothing that one owner does touches another's."""
    async with make_store() as store:
        theirs = _live("resp_1", key="k")
        await store.create("ann", theirs)
        await store.append("ann", "resp_1", _log(0))
        for stranger in ("bob", "ANN", "ann ", "an", "*", "ann\x00", *_ODD):
            assert await store.get(stranger, "resp_1") is None, f"get as {stranger!r} is None"
            assert await store.chain(stranger, "resp_1") == [], f"chain as {stranger!r} is empty"
            assert not await store.items(stranger, ["resp_1_in"]), f"items as {stranger!r} is empty"
            assert await store.update(stranger, replace(theirs, response=b"{}")) is False, "update is False"
            assert await store.update(stranger, theirs, _log(1)) is False, f"update as {stranger!r} is False"
            assert await store.delete(stranger, "resp_1") is False, f"delete as {stranger!r} is False"
            assert await store.append(stranger, "resp_1", _log(1)) is False, f"append as {stranger!r} is False"
            assert await store.append(stranger, "resp_1", _log(0)) is False, f"append as {stranger!r} is False"
            assert await store.events(stranger, "resp_1", -1) is None, f"events as {stranger!r} is None"
            assert await store.cancel(stranger, "resp_1", 0.0) is False, f"cancel as {stranger!r} is False"
            assert await store.renew([(stranger, "resp_1")], 0.0) == set(), f"renew as {stranger!r} is empty"
        assert await store.get("ann", "resp_1") == theirs, "the owner's record is untouched"
        _check_log(await store.events("ann", "resp_1", -1), 1)


async def keeps_owners_and_ids_apart(make_store: MakeStore) -> None:
    """Any text is an owner, and no owner and id run together into another owner and id."""
    pairs = [("", "a:b:c"), ("a", "b:c"), ("a:b", "c"), ("a/b", "c"), ("a", "b/c"), ("a", "{b}:c"), ("a:{b}", "c")]
    pairs += [("a\x00", "c"), ("a", "\x00c"), *((odd, "resp_odd") for odd in _ODD)]
    async with make_store() as store:
        for number, (owner, name) in enumerate(pairs):
            record = replace(_live(name), item_ids=(f"item_{number}",))
            assert await store.create(owner, record) is None, f"{owner!r} can have {name!r}"
            assert await store.append(owner, name, _log(0, number + 1)) is True, f"{owner!r}'s {name!r} has a log"
        for number, (owner, name) in enumerate(pairs):
            kept = await store.get(owner, name)
            assert kept is not None, f"{owner!r} has its {name!r}"
            assert kept.item_ids == (f"item_{number}",), f"{owner!r} has its own {name!r}"
            _check_log(await store.events(owner, name, -1), number + 1)
        for number, (owner, name) in enumerate(pairs):
            assert await store.delete(owner, name) is True, f"{owner!r} can delete {name!r}"
            for other_number, (other, other_name) in enumerate(pairs):
                left = await store.get(other, other_name)
                assert (left is not None) == (other_number > number), f"deleting {owner!r}'s harms {other!r}'s"


async def returns_chains_oldest_first(make_store: MakeStore) -> None:
    """`chain` holds the record and all before it, oldest first; branches and later ones are left out."""
    async with make_store() as store:
        records = [_record("resp_0")]
        for number in range(1, _CHAIN):
            records.append(_record(f"resp_{number}", previous=f"resp_{number - 1}"))
        branch = _record("resp_branch", previous="resp_3")
        for record in (*records, branch, _record("resp_lone")):
            await store.create("ann", record)
        assert await store.chain("ann", records[-1].id) == records, "a long chain is whole and in order"
        assert await store.chain("ann", "resp_3") == records[:4], "what came later is not part of a chain"
        assert await store.chain("ann", "resp_branch") == [*records[:4], branch], "a branch has its own chain"
        assert await store.chain("ann", "resp_0") == records[:1], "a first record is a chain of one"


async def begins_a_broken_chain_after_the_gap(make_store: MakeStore) -> None:
    """Where an earlier record is gone or another owner's, the chain begins after it, with its `previous_id`."""
    async with make_store() as store:
        for before, after in pairwise([None, "resp_0", "resp_1", "resp_2", "resp_3"]):
            await store.create("ann", _record(str(after), previous=before))
        await store.delete("ann", "resp_1")
        chain = await store.chain("ann", "resp_3")
        assert [record.id for record in chain] == ["resp_2", "resp_3"], "the chain begins after the gap"
        assert chain[0].previous_id == "resp_1", "its first record still says what came before"
        await store.create("bob", _record("resp_b", previous="resp_0"))
        chain = await store.chain("bob", "resp_b")
        assert [record.id for record in chain] == ["resp_b"], "another owner's record is no part of a chain"


async def finds_items_in_whatever_record_holds_them(make_store: MakeStore) -> None:
    """`items` finds all that are known in one call, and an item as long as any record holds it."""
    first = _record("resp_1", items=("in_1", "shared"))
    second = _record("resp_2", items=("shared", "out_2"))
    for gone, left in ((first, second), (second, first)):
        async with make_store() as store:
            await store.create("ann", first)
            await store.create("ann", replace(second, item_ids=("shared",), final=False))
            assert await store.update("ann", second) is True, "the second record can be updated"
            found = await store.items("ann", {"in_1", "out_2", "unknown"})
            assert found == {"in_1": first, "out_2": second}, "items gives each known item's record"
            await store.delete("ann", gone.id)
            found = await store.items("ann", ["shared"])
            assert found == {"shared": left}, f"{left.id} still holds the item when {gone.id} is deleted"
            await store.delete("ann", left.id)
            assert not await store.items("ann", ["shared"]), "an item is unknown when nothing holds it any more"


async def takes_many_at_once(make_store: MakeStore) -> None:
    """Calls that overlap do not mix."""
    async with make_store() as store:

        async def live(number: int) -> None:
            name, owner = f"resp_{number}", f"owner_{number % 3}"
            await store.create(owner, _record(name, final=False))
            for start in range(3):
                assert await store.append(owner, name, _log(start)) is True, f"{name} can be appended to"
            _check_log(await store.events(owner, name, -1), 3)
            assert await store.update(owner, _record(name)) is True, f"{name} can be updated"
            assert await store.get(owner, name) == _record(name), f"{name} is as it was updated"
            if number % 2:
                assert await store.delete(owner, name) is True, f"{name} can be deleted"

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(live, number)
        for number in range(30):
            kept = await store.get(f"owner_{number % 3}", f"resp_{number}")
            assert (kept is None) == bool(number % 2), f"resp_{number} is there only if it was not deleted"


async def knows_a_record_by_its_key(make_store: MakeStore) -> None:
    """`create` gives an owner's record that has the same key, and keeps nothing; `find` finds it."""
    async with make_store() as store:
        first = _live("resp_1", key="k")
        assert await store.create("ann", first) is None, "a new key is free"
        again = _live("resp_2", key="k")
        assert await store.create("ann", again) == first, "the record that has the key is given"
        assert await store.find("ann", "k") == first, "it is found by its key"
        assert await store.find("ann", "resp_1") is None, "an id is no key"
        assert await store.find("bob", "k") is None, "another owner's key finds nothing"
        assert await store.get("ann", "resp_2") is None, "nothing new is kept then"
        assert not await store.items("ann", again.item_ids), "nor its items"
        assert await store.expired(_FUTURE * 2) == [("ann", first)], "nor anything of it"
        assert await store.create("bob", replace(again, id="resp_b")) is None, "another owner's key is another"
        for number, other in enumerate(("K", "k ", "resp_1", *_ODD[1:], "k" * 200)):
            record = _live(f"resp_other_{number}", key=other)
            assert await store.create("ann", record) is None, f"{other!r} is free"
            assert await store.create("ann", replace(record, id="resp_2")) == record, f"{other!r} is taken then"
        for name in ("resp_none_1", "resp_none_2"):
            assert await store.create("ann", _live(name)) is None, "records without a key never clash"
        await store.cancel("ann", "resp_1", _PAST)
        now = replace(first, cancelled=True, lease=_PAST)
        assert await store.create("ann", again) == now, "the record is given as it is now"
        assert await store.update("ann", replace(now, final=True, response=b"{}")) is True, "update is True"
        now = replace(now, final=True, response=b"{}")
        assert await store.create("ann", again) == now, "a final record keeps its key"
        assert await store.delete("ann", "resp_1") is True, "delete is True"
        assert await store.find("ann", "k") is None, "what was deleted is not found"
        assert await store.create("ann", again) is None, "what was deleted has no key any more"
        assert await store.create("ann", first) == again, "the key is the new record's"
        for owner, key in (("a", "b:c"), ("a:b", "c"), ("a", "{b}:c"), ("a:{b}", "c"), ("a\x00b", "c"), ("", "a:b:c")):
            record = _live(f"resp_{len(owner)}_{len(key)}", key=key)
            assert await store.create(owner, record) is None, f"{owner!r} and {key!r} do not run together"


async def lets_one_of_racing_creates_win(make_store: MakeStore) -> None:
    """Of creates with the same key at the same time exactly one keeps its record; the others are given that."""
    async with make_store() as store:
        for turn in range(3):
            records = [_live(f"resp_{turn}_{number}", key=f"k{turn}") for number in range(_AT_ONCE)]
            answers = await _together([partial(store.create, "ann", record) for record in records])
            assert answers.count(None) == 1, "exactly one create is None"
            winner = records[answers.index(None)]
            assert all(answer in (None, winner) for answer in answers), "the others give the winner's record"
            for record in records:
                kept = await store.get("ann", record.id)
                assert kept == (winner if record is winner else None), "only the winner's record is kept"


async def appends_only_where_the_log_goes_on(make_store: MakeStore) -> None:
    """A log begins with 0, and has no gap and nothing twice: `append` elsewhere is False and keeps nothing."""
    async with make_store() as store:
        await store.create("ann", _live("resp_1"))
        _check_log(await store.events("ann", "resp_1", -1), 0)
        assert await store.append("ann", "resp_1", _log(1)) is False, "a log begins with 0"
        _check_log(await store.events("ann", "resp_1", -1), 0)
        assert await store.append("ann", "resp_1", _log(0, 3)) is True, "append to an empty log is True"
        for start, count in ((0, 3), (0, 4), (2, 1), (2, 2), (4, 1), (300, 1)):
            assert await store.append("ann", "resp_1", _log(start, count)) is False, f"append at {start} of 3 is False"
            _check_log(await store.events("ann", "resp_1", -1), 3)
        assert await store.append("ann", "resp_1", _log(3)) is True, "append where the log goes on is True"
        assert await store.cancel("ann", "resp_1", _PAST) is True, "cancel is True"
        assert await store.append("ann", "resp_1", _log(4, 2)) is True, "a cancelled record's log goes on until its end"
        _check_log(await store.events("ann", "resp_1", -1), 6)
        assert await store.get("ann", "resp_1") == replace(_live("resp_1", lease=_PAST), cancelled=True), (
            "append leaves the record as it is"
        )


async def gives_the_events_that_come_after(make_store: MakeStore) -> None:
    """`events` gives all that comes after a number, in order and bytes for bytes, and nothing else but in the first."""
    async with make_store() as store:
        await store.create("ann", _live("resp_1"))
        end = 0
        for number in range(_PIECES):
            piece = _log(end, number % 5 + 1)
            assert await store.append("ann", "resp_1", piece) is True, f"append at {end} is True"
            end = piece.end
            _check_log(await store.events("ann", "resp_1", piece.start - 1), end, piece.start - 1)
        for after in (-1, 0, 1, 2, 3, 100, 101, 102, 103, 104, end // 2, end - 3, end - 2, end - 1, end, end + 1000):
            _check_log(await store.events("ann", "resp_1", after), end, after)
        assert await store.update("ann", replace(_record("resp_1"), events="logged")) is True, "update is True"
        _check_log(await store.events("ann", "resp_1", end // 3), end, end // 3)
        large = Log(0, 1, bytes(range(256)) * 4000)
        await store.create("ann", _live("resp_2"))
        assert await store.append("ann", "resp_2", large) is True, "a large piece is kept"
        assert list(await store.events("ann", "resp_2", -1) or ()) == [large], "a large piece is given as it was"


async def updates_record_and_log_in_one_step(make_store: MakeStore) -> None:
    """`update` keeps both the record and its log, or, where the log does not go on, neither."""
    async with make_store() as store:
        first = _live("resp_1")
        await store.create("ann", first)
        second, final = replace(first, response=b"{2}", item_ids=("2",)), replace(first, response=b"{3}", final=True)
        assert await store.update("ann", second, _log(0, 2)) is True, "update with a log is True"
        assert await store.get("ann", "resp_1") == second, "the record is replaced"
        _check_log(await store.events("ann", "resp_1", -1), 2)
        for start in (0, 1, 3, 200):
            assert await store.update("ann", final, _log(start)) is False, f"update with a log at {start} of 2 is False"
            assert await store.get("ann", "resp_1") == second, "the record is as it was"
            assert set(await store.items("ann", ["2", *final.item_ids])) == {"2"}, "so are its items"
            _check_log(await store.events("ann", "resp_1", -1), 2)
        assert await store.append("ann", "resp_1", _log(2)) is True, "what was refused did not end the record"
        assert await store.update("ann", replace(second, response=b"{}")) is True, "update without a log is True"
        _check_log(await store.events("ann", "resp_1", -1), 3)
        assert await store.update("ann", final, _log(3, 2)) is True, "the last events and the end are one step"
        assert await store.get("ann", "resp_1") == final, "the record is replaced"
        _check_log(await store.events("ann", "resp_1", -1), 5)


async def lets_one_of_racing_writers_win(make_store: MakeStore) -> None:
    """Of those that append at the same place, and of those that end a record, at the same time, one is told True."""
    async with make_store() as store:
        await store.create("ann", _live("resp_1"))
        end = 0
        for _ in range(3):
            pieces = [_log(end, number % 3 + 1) for number in range(_AT_ONCE)]
            answers = await _together([partial(store.append, "ann", "resp_1", piece) for piece in pieces])
            assert sorted(map(bool, answers)) == [False] * (_AT_ONCE - 1) + [True], "exactly one append is True"
            end = pieces[answers.index(True)].end
            _check_log(await store.events("ann", "resp_1", -1), end)
        ends = [replace(_live("resp_1"), response=b"{%d}" % number, final=True) for number in range(_AT_ONCE // 2)]
        append = partial(store.append, "ann", "resp_1", _log(end, 2))
        updates = [partial(store.update, "ann", record, _log(end)) for record in ends]
        answers = await _together([*updates, append])
        assert sorted(map(bool, answers)) == [False] * len(ends) + [True], "exactly one of update and append is True"
        winner = answers.index(True)
        kept = await store.get("ann", "resp_1")
        assert kept == [*ends, _live("resp_1")][winner], "the record is the winner's"
        _check_log(await store.events("ann", "resp_1", -1), end + (2 if winner == len(ends) else 1))
        await store.create("ann", _live("resp_2"))
        ends = [replace(record, id="resp_2") for record in ends]
        answers = await _together([partial(store.update, "ann", record) for record in ends])
        assert sorted(map(bool, answers)) == [False] * (len(ends) - 1) + [True], "a record ends once"
        kept = await store.get("ann", "resp_2")
        assert kept == ends[answers.index(True)], "the end that was told True is kept"


async def cancels_what_is_not_final(make_store: MakeStore) -> None:
    """`cancel` sets `cancelled`, and ends the lease at `until` at the latest; nothing else changes."""
    async with make_store() as store:
        record = _live("resp_1", lease=_NOW, key="k")
        await store.create("ann", record)
        await store.create("ann", _live("resp_2"))
        cancelled = replace(record, cancelled=True)
        for until, lease in ((_FUTURE, _NOW), (_PAST + 1 / 3, _PAST + 1 / 3), (_NOW, _PAST + 1 / 3), (_PAST, _PAST)):
            assert await store.cancel("ann", "resp_1", until) is True, "cancel of a record that is not final is True"
            assert await store.get("ann", "resp_1") == replace(cancelled, lease=lease), "the lease is never lengthened"
        found = await store.items("ann", ["resp_1_in"])
        assert found == {"resp_1_in": replace(cancelled, lease=_PAST)}, "items gives the record as it is now"
        assert await store.get("ann", "resp_2") == _live("resp_2"), "no other record is cancelled"


async def cancels_or_ends_but_not_both(make_store: MakeStore) -> None:
    """Where a record is ended and cancelled at the same time, `cancel` is True just if the record says so."""
    async with make_store() as store:
        for number in range(_AT_ONCE):
            record = _live(f"resp_{number}")
            await store.create("ann", record)
            end = partial(store.update, "ann", replace(record, final=True), _log(0))
            cancel = partial(store.cancel, "ann", record.id, _PAST)
            answers = await _together([end, cancel] if number % 2 else [cancel, end])
            ended, told = answers if number % 2 else reversed(answers)
            assert ended is True, "a cancelled record can end"
            kept = await store.get("ann", record.id)
            assert kept == replace(record, final=True, cancelled=told is True), "cancel told what it did"
            _check_log(await store.events("ann", record.id, -1), 1)


async def renews_only_what_is_worked_on(make_store: MakeStore) -> None:
    """`renew` gives what is neither final, nor gone, nor to be cancelled, and renews the leases of only these."""
    async with make_store() as store:
        for name in ("live", "ended", "cancelled", "deleted", "other"):
            await store.create("ann", _live(name, lease=_NOW))
        ended = replace(_live("ended", lease=_NOW), final=True)
        await store.update("ann", ended)
        await store.cancel("ann", "cancelled", _PAST)
        await store.delete("ann", "deleted")
        for owner in _ODD:
            await store.create(owner, _live("live", lease=_NOW))
        odd = {(owner, "live") for owner in _ODD}
        foreign = [("bob", "live"), ("ann\x00", "live"), ("an", "nlive"), ("live", "ann")]
        asked = [*foreign, *odd, *(("ann", name) for name in ("live", "ended", "cancelled", "deleted", "unknown"))]
        survivors = {("ann", "live"), *odd}
        assert await store.renew(asked) == survivors, "renew gives those that are to be worked on"
        for owner, name in survivors:
            assert await store.get(owner, name) == _live(name, lease=_NOW), "without a time it renews nothing"
        until = _FUTURE + 1 / 3
        assert await store.renew(set(asked), until) == survivors, "with a time it gives the same"
        for owner, name in survivors:
            assert await store.get(owner, name) == _live(name, lease=until), "their leases end at the time given"
        assert await store.get("ann", "ended") == ended, "a final record never changes"
        cancelled = replace(_live("cancelled", lease=_PAST), cancelled=True)
        assert await store.get("ann", "cancelled") == cancelled, "a cancelled record's lease is not renewed"
        assert await store.get("ann", "other") == _live("other", lease=_NOW), "what was not asked about is not renewed"


async def renews_many_at_once(make_store: MakeStore) -> None:
    """`renew` takes as many runs as a process may be at work on."""
    async with make_store() as store:
        runs = [(f"owner_{number % 3}", _live(f"resp_{number}", lease=_PAST)) for number in range(_RUNS)]
        await _create_all(store, runs)
        for owner, record in runs[::7]:
            await store.cancel(owner, record.id, _PAST)
        left = {(owner, record.id) for number, (owner, record) in enumerate(runs) if number % 7}
        asked = [(owner, record.id) for owner, record in runs]
        assert await store.renew(asked) == left, "renew gives all that are to be worked on"
        assert await store.renew(asked, _FUTURE) == left, "with a time, too"
        expired = await store.expired(_NOW, limit=_RUNS)
        assert {(owner, record.id) for owner, record in expired} == set(asked) - left, "their leases are renewed"


async def finds_what_nobody_works_on(make_store: MakeStore) -> None:
    """`expired` gives owners and records, of all owners, that are not final and whose lease is over; some at a time."""
    async with make_store() as store:
        over = {(owner, "resp_over"): _live("resp_over", lease=_PAST) for owner in ("ann", *_ODD)}
        over["ann", "resp_never"] = _live("resp_never", lease=0.0)
        live = [_live("resp_live"), _live("resp_renewed", lease=_PAST), _live("resp_updated", lease=_PAST)]
        ended = [replace(_live("resp_born", lease=_PAST), final=True), _live("resp_ended", lease=_PAST)]
        cancelled = [_live("resp_cancelled")]
        assert await store.expired(_NOW) == [], "nothing has expired in an empty store"
        await _create_all(store, [(owner, record) for (owner, _), record in over.items()])
        await _create_all(store, [("ann", record) for record in (*live, *ended, *cancelled)])
        await store.renew([("ann", "resp_renewed")], _FUTURE)
        await store.update("ann", replace(live[-1], lease=_FUTURE))
        await store.update("ann", replace(ended[-1], final=True))
        await store.cancel("ann", "resp_cancelled", _PAST)
        over["ann", "resp_cancelled"] = replace(cancelled[0], lease=_PAST, cancelled=True)
        for _ in range(2):
            found = await store.expired(_NOW)
            assert len(found) == len(over), "each is given once"
            assert {(owner, record.id): record for owner, record in found} == over, "owners and records are as kept"
        while over:
            found = await store.expired(_NOW, limit=3)
            assert len(found) == min(3, len(over)), "no more are given than the limit, and no fewer if there are more"
            for owner, record in found:
                assert over.pop((owner, record.id)) == record, "what is dealt with is not given again"
                assert await store.update(owner, replace(record, final=True)) is True, "the record can be ended"
        assert await store.expired(_NOW) == [], "nothing is left"
        found = await store.expired(_FUTURE * 2)
        assert {record.id for _, record in found} == {record.id for record in live}, "what is live expires later"


async def prunes_nothing_that_is_in_use(make_store: MakeStore) -> None:
    """`prune` gives how many records went, and what is live or has just been kept is not among them."""
    async with make_store() as store:
        assert await store.prune() == 0, "an empty store has nothing to prune"
        live, final = _live("resp_live", key="k"), replace(_record("resp_final"), events="logged")
        await store.create("ann", live)
        await store.append("ann", live.id, _log(0, 2))
        await store.create("ann", final)
        gone = await store.prune()
        assert isinstance(gone, int), "prune is a number"
        assert gone == 0, "nothing is pruned that was just kept"
        assert await store.get("ann", live.id) == live, "the live record is there"
        assert await store.get("ann", final.id) == final, "the final one, too"
        _check_log(await store.events("ann", live.id, -1), 2)
        assert await store.append("ann", live.id, _log(2)) is True, "its log goes on"
        assert await store.create("ann", _live("resp_new", key="k")) == live, "its key is taken"


STORE_CONTRACT: Final[tuple[Check, ...]] = (
    keeps_what_it_was_given,
    knows_nothing_of_unknown_ids,
    replaces_on_update,
    never_changes_a_final_record,
    keeps_what_an_update_may_not_change,
    forgets_on_delete,
    shows_nobody_elses,
    keeps_owners_and_ids_apart,
    returns_chains_oldest_first,
    begins_a_broken_chain_after_the_gap,
    finds_items_in_whatever_record_holds_them,
    knows_a_record_by_its_key,
    lets_one_of_racing_creates_win,
    appends_only_where_the_log_goes_on,
    gives_the_events_that_come_after,
    updates_record_and_log_in_one_step,
    lets_one_of_racing_writers_win,
    cancels_what_is_not_final,
    cancels_or_ends_but_not_both,
    renews_only_what_is_worked_on,
    renews_many_at_once,
    finds_what_nobody_works_on,
    prunes_nothing_that_is_in_use,
    takes_many_at_once,
)
"""The contract: all of these, each against a store of its own."""
