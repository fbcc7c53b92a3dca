"""The queries behind the methods of `OrmStore`, which run in its threads."""
# The methods of `ResponseStore` are documented there.

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from django.db import IntegrityError, connections
from django.db.models import F, QuerySet, Value
from django.db.models.functions import Least

from responses_kit.errors import StoreError
from responses_kit.stores.key_encoding import encode_key
from responses_kit.stores.protocol import Log, Record

from ..models import Conversation, Item, Piece, Response
from . import statements as sql
from .pruning import delete_responses
from .rows import record_to_columns, row_to_record, to_datetime

__all__ = ["PendingAppend", "Queries"]

_MAX_ATTEMPTS: Final = 3
"""Attempts before a write that conflicts with another process fails."""

_EXPIRY_TOLERANCE: Final = 0.01
"""Fraction of the ttl by which a stored expiry may lag behind the last use, so that reads seldom write."""


class PendingAppend(NamedTuple):
    """A log to append to a response's log. The owner and the id are encoded keys."""

    owner: str
    response_id: str
    log: Log


class Queries:
    """The queries on the tables of one database. Parameters that end in `_key` are encoded by `encode_key`.

    Args:
        using: The database's alias.
        vendor: "postgresql" or "sqlite".
        ttl: Seconds after its last use at which a conversation expires.
        log_ttl: Seconds after a response's end at which its events expire.
        clock: Seconds since the epoch.
    """

    def __init__(self, using: str, vendor: str, *, ttl: float, log_ttl: float, clock: Callable[[], float]) -> None:
        self._using, self._vendor = using, vendor
        self._ttl, self._log_ttl, self._clock = ttl, log_ttl, clock

    def create(self, owner: str, record: Record) -> Record | None:
        now = self._clock()
        columns = {"created": to_datetime(now)} | self._columns(record, now)
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._create_once(owner, record, columns, now)
            except IntegrityError:  # a concurrent request created a record with this key
                continue
        raise StoreError("A response with the same id or idempotency key exists. Try again.")

    def _create_once(self, owner: str, record: Record, columns: Mapping[str, Any], now: float) -> Record | None:
        owner_key, key = encode_key(owner), None if record.key is None else encode_key(record.key)
        with sql.atomic(self._using):
            if key is not None and (holder := _first(self._with_expiry().filter(owner=owner_key, key=key))) is not None:
                if holder.expires > now:
                    self._touch(now, [holder])
                    return row_to_record(holder)
                self._responses.filter(~sql.is_unexpired(now), pk=holder.pk).update(key=None)
            conversation = self._lock_conversation(owner_key, record.previous_id, now)
            if conversation is None:
                conversation = Conversation(owner=owner_key, root=encode_key(record.id), expires=now + self._ttl)
                self._conversations.bulk_create(  # the row may exist, if its first response was deleted
                    [conversation], update_conflicts=True, unique_fields=["owner", "root"], update_fields=["expires"]
                )
            response = Response(
                conversation=conversation,
                owner=owner_key,
                response_id=encode_key(record.id),
                key=key,
                head=json.dumps([owner, record.id, record.key, record.fingerprint]),
                **columns,
            )
            self._responses.bulk_create([response])
            self._create_items(response, record.item_ids)
        return None

    def _lock_conversation(self, owner_key: str, previous_id: str | None, now: float) -> Conversation | None:
        """Lock and return the conversation of the response that a new one continues, and extend its lifetime."""
        if previous_id is None:
            return None
        locked = self._conversations.select_for_update(of=("self",), no_key=True).filter(expires__gt=now)
        found: Conversation | None = _first(
            locked.filter(responses__owner=owner_key, responses__response_id=encode_key(previous_id))
        )
        if found is not None and found.expires < self._fresh_until(now):
            self._conversations.filter(pk=found.pk).update(expires=now + self._ttl)
        return found

    def update(self, owner_key: str, record: Record, log: Log | None) -> bool:
        now = self._clock()
        columns = self._columns(record, now)
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._update_once(owner_key, record, columns, log, now)
            except IntegrityError:  # another process appended at the same place after the check
                continue
        raise _conflict_error()

    def _update_once(
        self, owner_key: str, record: Record, columns: Mapping[str, Any], log: Log | None, now: float
    ) -> bool:
        with sql.atomic(self._using):
            locked = self._unexpired(now).select_for_update(of=("self",), no_key=True)
            rows = locked.filter(owner=owner_key, response_id=encode_key(record.id))
            rows = rows.only("owner", "conversation_id", "final", "cancelled", "names")
            row = _first(rows if log is None else rows.annotate(end=sql.log_end()))
            if row is None or row.final or (log is not None and log.start != row.end):
                return False
            if log is not None:
                self._pieces.bulk_create([Piece(response=row, start=log.start, count=log.count, data=log.data)])
            self._responses.filter(pk=row.pk).update(**{**columns, "cancelled": row.cancelled or record.cancelled})
            _, old = json.loads(row.names)
            before, after = set(old), set(record.item_ids)
            if gone := before - after:
                ids = sql.text_values(self._vendor, map(encode_key, gone))
                Item.objects.using(self._using).filter(response=row, item_id__in=ids).delete()
            self._create_items(row, after - before)
            self._touch(now, [row])
        return True

    def append(self, additions: Sequence[PendingAppend]) -> list[bool]:
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._append_many(additions) if len(additions) > 1 else [self._append_one(*additions)]
            except IntegrityError:  # another process appended at the same place after the check
                continue
        raise _conflict_error()

    def _append_one(self, addition: PendingAppend) -> bool:
        owner, response_id, log = addition
        where: dict[str, Any] = {
            "owner": owner,
            "id": response_id,
            "start": log.start,
            "count": log.count,
            "data": log.data,
        }
        with sql.autocommit(self._using), connections[self._using].cursor() as cursor:
            cursor.execute(sql.APPEND_PIECE + sql.LOCK_CLAUSE[self._vendor], where)
            return bool(cursor.rowcount)

    def _append_many(self, additions: Sequence[PendingAppend]) -> list[bool]:
        done: list[bool] = []
        new: list[Any] = []
        with sql.atomic(self._using):
            pairs = {(owner, response_id): None for owner, response_id, _ in additions}
            locked = self._responses.select_for_update(no_key=True).order_by("pk").annotate(end=sql.log_end())
            rows = locked.filter(pk__in=sql.response_pks(self._vendor, pairs), final=False)
            ends = {
                (owner, response_id): (pk, end)
                for pk, owner, response_id, end in rows.values_list("pk", "owner", "response_id", "end")
            }
            for owner, response_id, log in additions:
                pk, end = ends.get((owner, response_id), (0, None))
                is_next = log.start == end
                done.append(is_next)
                if is_next:
                    ends[owner, response_id] = pk, log.end
                    new += (pk, log.start, log.count, log.data)
            if new:
                with connections[self._using].cursor() as cursor:
                    cursor.execute(sql.insert_pieces(sum(done)), new)
        return done

    def find(self, **where: str) -> Record | None:
        now = self._clock()
        rows = self._fetch(now, self._unexpired(now).filter(**where))
        return row_to_record(rows[0]) if rows else None

    def events(self, owner_key: str, response_key: str, after: int) -> Sequence[Log] | None:
        now = self._clock()
        where = {"owner": owner_key, "id": response_key, "next": after + 1, "now": now}
        rows = self._fetch(now, self._responses.raw(sql.READ_LOG, where))
        if not rows:
            return None
        return [
            Log(row.piece_start, row.piece_count, bytes(row.piece_data)) for row in rows if row.piece_start is not None
        ]

    def chain(self, owner_key: str, response_id: str) -> list[Record]:
        now = self._clock()
        where = {"owner": owner_key, "id": encode_key(response_id), "now": now}
        rows = self._fetch(now, self._responses.raw(sql.READ_CHAIN, where))
        by_id = {record.id: record for record in map(row_to_record, rows)}
        records: list[Record] = []
        following: str | None = response_id
        while following is not None and (record := by_id.pop(following, None)) is not None:
            records.append(record)
            following = record.previous_id
        records.reverse()
        return records

    def items(self, owner_key: str, wanted: set[str]) -> Mapping[str, Record]:
        now = self._clock()
        holders = sql.item_holder_pks(self._vendor, owner_key, map(encode_key, wanted), now)
        found: dict[str, Record] = {}
        for record in map(row_to_record, self._fetch(now, self._unexpired(now).filter(pk__in=holders))):
            for item_id in wanted.intersection(record.item_ids):
                found[item_id] = record
        return found

    def delete(self, owner_key: str, response_key: str) -> bool:
        with sql.atomic(self._using):
            kept = self._unexpired(self._clock()).select_for_update(of=("self",))
            row = _first(kept.filter(owner=owner_key, response_id=response_key).only("pk"))
            if row is None:
                return False
            delete_responses(self._using, [row.pk])
        return True

    def cancel(self, owner_key: str, response_key: str, until: float) -> bool:
        live = self._responses.filter(
            sql.is_unexpired(self._clock()), owner=owner_key, response_id=response_key, final=False
        )
        with sql.autocommit(self._using):
            return live.update(cancelled=True, lease=Least(F("lease"), Value(until))) > 0

    def renew(self, keys: Sequence[tuple[str, str]], until: float | None) -> set[tuple[str, str]]:
        now = self._clock()
        at_work = (
            self._unexpired(now)
            .filter(pk__in=sql.response_pks(self._vendor, keys), final=False, cancelled=False)
            .only("owner", "response_id", "conversation_id")
        )
        if until is None:
            with sql.autocommit(self._using):
                rows = list(at_work)
        else:
            with sql.atomic(self._using):
                rows = list(at_work.select_for_update(of=("self",), no_key=True).order_by("pk"))
                self._responses.filter(pk__in=[row.pk for row in rows]).update(lease=until)
                self._touch(now, rows)
        return {(row.owner, row.response_id) for row in rows}

    def expired(self, until: float, limit: int) -> list[tuple[str, Record]]:
        overdue = self._unexpired(self._clock()).filter(final=False, lease__lt=until).order_by("lease")
        with sql.autocommit(self._using):
            return [(json.loads(row.head)[0], row_to_record(row)) for row in overdue[:limit]]

    @property
    def _responses(self) -> QuerySet[Response]:
        return Response.objects.using(self._using)

    @property
    def _conversations(self) -> QuerySet[Conversation]:
        return Conversation.objects.using(self._using)

    @property
    def _pieces(self) -> QuerySet[Piece]:
        return Piece.objects.using(self._using)

    def _with_expiry(self) -> QuerySet[Any]:
        return self._responses.annotate(expires=F("conversation__expires"))

    def _unexpired(self, now: float) -> QuerySet[Any]:
        return self._with_expiry().filter(expires__gt=now)

    def _fetch(self, now: float, rows: Iterable[Any]) -> list[Any]:
        """Return the rows of a query, and extend the lifetime of their conversations."""
        with sql.autocommit(self._using):
            found = list(rows)
        if self._stale_conversations(now, found):
            with sql.atomic(self._using):
                self._touch(now, found)
        return found

    def _fresh_until(self, now: float) -> float:
        return now + self._ttl * (1 - _EXPIRY_TOLERANCE)

    def _stale_conversations(self, now: float, rows: Iterable[Any]) -> set[int]:
        return {row.conversation_id for row in rows if row.expires < self._fresh_until(now)}

    def _touch(self, now: float, rows: Iterable[Any]) -> None:
        """Extend the lifetime of the rows' conversations, locked in the order of their keys to avoid deadlocks."""
        if stale := self._stale_conversations(now, rows):
            locked = self._conversations.select_for_update(no_key=True).filter(pk__in=stale, expires__gt=now)
            alive = list(locked.order_by("pk").values_list("pk", flat=True))
            self._conversations.filter(pk__in=alive).update(expires=now + self._ttl)

    def _create_items(self, response: Response, item_ids: Collection[str]) -> None:
        items = [Item(response=response, owner=response.owner, item_id=encode_key(item_id)) for item_id in {*item_ids}]
        Item.objects.using(self._using).bulk_create(items)

    def _columns(self, record: Record, now: float) -> dict[str, Any]:
        return record_to_columns(record, now + self._log_ttl if record.final else None)


def _first(rows: QuerySet[Any]) -> Any:
    return next(iter(rows[:1]), None)


def _conflict_error() -> StoreError:
    return StoreError("The response is being written by another process. Try again.")
