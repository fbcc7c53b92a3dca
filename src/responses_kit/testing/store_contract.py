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

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Final

import anyio

from ..stores import Record, ResponseStore

__all__ = ["STORE_CONTRACT", "Check", "MakeStore"]

MakeStore = Callable[[], AbstractAsyncContextManager[ResponseStore]]
"""Makes an empty store, and clears it away at the end."""

Check = Callable[[MakeStore], Awaitable[None]]
"""One clause of the contract."""

_CHAIN = 60
"""Responses of a conversation that is long, but no longer than people's are."""


def _record(name: str, *, previous: str | None = None, items: tuple[str, ...] = (), final: bool = True) -> Record:
    return Record(
        id=name,
        previous_id=previous,
        input=f'[{{"type":"message","id":"{name}_in","content":"né 日本 \\u0000"}}]'.encode(),
        response=f'{{"id":"{name}","output":[]}}'.encode(),
        item_ids=items or (f"{name}_in", f"{name}_out"),
        final=final,
    )


async def keeps_what_it_was_given(make_store: MakeStore) -> None:
    """`get` returns an equal record: bytes for bytes, item ids in order, nulls as nulls."""
    records = [
        _record("resp_1"),
        _record("resp_2", previous="resp_1", final=False),
        replace(_record("resp_3"), input=b"[]", item_ids=()),
        replace(_record("resp_4"), response=b'{"text":"' + b"x" * 1_000_000 + b'"}'),
        replace(_record("resp_5"), item_ids=tuple(f"msg_{number:04}" for number in reversed(range(500)))),
    ]
    async with make_store() as store:
        for record in records:
            await store.create("ann", record)
        for record in records:
            kept = await store.get("ann", record.id)
            assert kept == record, f"get of {record.id} differs from what was created"
            assert isinstance(kept.input, bytes), "input is bytes"
            assert isinstance(kept.response, bytes), "response is bytes"


async def knows_nothing_of_unknown_ids(make_store: MakeStore) -> None:
    """Unknown ids are None, False or empty, never an exception."""
    async with make_store() as store:
        await store.create("ann", _record("resp_1"))
        for unknown in ("resp_2", "", "resp_", "resp_1 ", "RESP_1", "%", "*", "' OR '1'='1", "x" * 1000):
            assert await store.get("ann", unknown) is None, f"get of {unknown!r} is None"
            assert await store.chain("ann", unknown) == [], f"chain of {unknown!r} is empty"
            assert not await store.items("ann", [unknown]), f"items of {unknown!r} is empty"
            assert await store.update("ann", _record(unknown)) is False, f"update of {unknown!r} is False"
            assert await store.delete("ann", unknown) is False, f"delete of {unknown!r} is False"
            assert await store.get("ann", unknown) is None, f"a refused update of {unknown!r} keeps nothing"
        assert await store.items("ann", []) == {}, "items of nothing is empty"
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


async def forgets_on_delete(make_store: MakeStore) -> None:
    """`delete` returns True once; then nothing of the record is known, and a late update keeps nothing."""
    async with make_store() as store:
        await store.create("ann", _record("resp_1", final=False))
        await store.create("ann", _record("resp_2", previous="resp_1"))
        assert await store.delete("ann", "resp_1") is True, "the first delete is True"
        assert await store.delete("ann", "resp_1") is False, "the second delete is False"
        assert await store.update("ann", _record("resp_1")) is False, "update after delete is False"
        assert await store.get("ann", "resp_1") is None, "what was deleted is gone"
        assert not await store.items("ann", ["resp_1_in", "resp_1_out"]), "its items are gone too"
        assert await store.get("ann", "resp_2") is not None, "what continued it stays"


async def shows_nobody_elses(make_store: MakeStore) -> None:
    """Under another owner every id is unknown, and nothing that one owner does touches another's."""
    async with make_store() as store:
        theirs = _record("resp_1")
        await store.create("ann", theirs)
        for stranger in ("bob", "", "ANN", "ann ", "an", "%", "*", "ann\x00", "_nn"):
            assert await store.get(stranger, "resp_1") is None, f"get as {stranger!r} is None"
            assert await store.chain(stranger, "resp_1") == [], f"chain as {stranger!r} is empty"
            assert not await store.items(stranger, ["resp_1_in"]), f"items as {stranger!r} is empty"
            assert await store.update(stranger, replace(theirs, response=b"{}")) is False, "update is False"
            assert await store.delete(stranger, "resp_1") is False, f"delete as {stranger!r} is False"
        assert await store.get("ann", "resp_1") == theirs, "the owner's record is untouched"


async def keeps_owners_and_ids_apart(make_store: MakeStore) -> None:
    """Any text is an owner, and no owner and id run together into another owner and id."""
    pairs = [("", "a:b:c"), ("a", "b:c"), ("a:b", "c"), ("a/b", "c"), ("a", "b/c"), ("Ä 日本 😀", "c"), ("'\";--", "c")]
    async with make_store() as store:
        for number, (owner, name) in enumerate(pairs):
            await store.create(owner, _record(name, items=(f"item_{number}",)))
        for number, (owner, name) in enumerate(pairs):
            kept = await store.get(owner, name)
            assert kept is not None, f"{owner!r} has its {name!r}"
            assert kept.item_ids == (f"item_{number}",), f"{owner!r} has its own {name!r}"
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


STORE_CONTRACT: Final[tuple[Check, ...]] = (
    keeps_what_it_was_given,
    knows_nothing_of_unknown_ids,
    replaces_on_update,
    forgets_on_delete,
    shows_nobody_elses,
    keeps_owners_and_ids_apart,
    returns_chains_oldest_first,
    begins_a_broken_chain_after_the_gap,
    finds_items_in_whatever_record_holds_them,
    takes_many_at_once,
)
"""The contract: all of these, each against a store of its own."""
