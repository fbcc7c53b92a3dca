"""What `OrmStore` does with its tables: each method is one call of the store's, in one thread."""
# what a protocol's methods do is said at the protocol

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
from .pruning import forget
from .rows import columns_of, moment, record_of

__all__ = ["Addition", "Queries"]

_TRIES: Final = 3
"""How often what met another process at the same place looks anew."""

_SLACK: Final = 0.01
"""The part of the ttl by which an expiry may lag behind the last use, so that reading seldom writes."""


class Addition(NamedTuple):
    """What is to be appended to a response's log; owner and id are keys."""

    owner: str
    response_id: str
    log: Log


class Queries:
    """The tables of one database.

    Args:
        using: The database's alias.
        vendor: "postgresql" or "sqlite".
        ttl: Seconds after its last use at which a conversation is gone.
        log_ttl: Seconds after a response's end at which its events are gone.
        clock: Seconds since the epoch.
    """

    def __init__(self, using: str, vendor: str, *, ttl: float, log_ttl: float, clock: Callable[[], float]) -> None:
        self._using, self._vendor = using, vendor
        self._ttl, self._log_ttl, self._clock = ttl, log_ttl, clock

    def create(self, owner: str, record: Record) -> Record | None:
        now = self._clock()
        columns = {"created": moment(now)} | self._columns(record, now)
        for _ in range(_TRIES):
            try:
                return self._create_once(owner, record, columns, now)
            except IntegrityError:  # by somebody who came at the same time
                continue
        raise StoreError("A response with this id, or for the same key, is being kept already. Try again.")

    def _create_once(self, owner: str, record: Record, columns: Mapping[str, Any], now: float) -> Record | None:
        at, key = encode_key(owner), None if record.key is None else encode_key(record.key)
        with sql.whole(self._using):
            if key is not None and (holder := _first(self._all_with_expiry().filter(owner=at, key=key))) is not None:
                if holder.expires > now:
                    self._touch(now, [holder])
                    return record_of(holder)
                self._responses.filter(~sql.alive(now), pk=holder.pk).update(key=None)
            conversation = self._continued(at, record.previous_id, now)
            if conversation is None:
                conversation = Conversation(owner=at, root=encode_key(record.id), expires=now + self._ttl)
                self._conversations.bulk_create(  # it may be there, without its first response
                    [conversation], update_conflicts=True, unique_fields=["owner", "root"], update_fields=["expires"]
                )
            response = Response(
                conversation=conversation,
                owner=at,
                response_id=encode_key(record.id),
                key=key,
                head=json.dumps([owner, record.id, record.key, record.fingerprint]),
                **columns,
            )
            self._responses.bulk_create([response])
            self._hold(response, record.item_ids)
        return None

    def _continued(self, at: str, previous_id: str | None, now: float) -> Conversation | None:
        """The conversation of the response that a new one continues, which does not expire any more meanwhile."""
        if previous_id is None:
            return None
        locked = self._conversations.select_for_update(of=("self",), no_key=True).filter(expires__gt=now)
        found: Conversation | None = _first(
            locked.filter(responses__owner=at, responses__response_id=encode_key(previous_id))
        )
        if found is not None and found.expires < self._fresh_until(now):
            self._conversations.filter(pk=found.pk).update(expires=now + self._ttl)
        return found

    def update(self, at: str, record: Record, log: Log | None) -> bool:
        now = self._clock()
        columns = self._columns(record, now)
        for _ in range(_TRIES):
            try:
                return self._update_once(at, record, columns, log, now)
            except IntegrityError:  # somebody appended at the same place between our looking and our writing
                continue
        raise _crowded()

    def _update_once(self, at: str, record: Record, columns: Mapping[str, Any], log: Log | None, now: float) -> bool:
        with sql.whole(self._using):
            locked = self._kept(now).select_for_update(of=("self",), no_key=True)
            rows = locked.filter(owner=at, response_id=encode_key(record.id))
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
                ids = sql.each(self._vendor, map(encode_key, gone))
                Item.objects.using(self._using).filter(response=row, item_id__in=ids).delete()
            self._hold(row, after - before)
            self._touch(now, [row])
        return True

    def append(self, additions: Sequence[Addition]) -> list[bool]:
        for _ in range(_TRIES):
            try:
                return self._append_together(additions) if len(additions) > 1 else [self._append_alone(*additions)]
            except IntegrityError:  # another process appended at the same place between our looking and our writing
                continue
        raise _crowded()

    def _append_alone(self, addition: Addition) -> bool:
        owner, response_id, log = addition
        where: dict[str, Any] = {
            "owner": owner,
            "id": response_id,
            "start": log.start,
            "count": log.count,
            "data": log.data,
        }
        with sql.alone(self._using), connections[self._using].cursor() as cursor:
            cursor.execute(sql.APPEND + sql.LOCKED[self._vendor], where)
            return bool(cursor.rowcount)

    def _append_together(self, additions: Sequence[Addition]) -> list[bool]:
        done: list[bool] = []
        new: list[Any] = []
        with sql.whole(self._using):
            pairs = {(owner, response_id): None for owner, response_id, _ in additions}
            locked = self._responses.select_for_update(no_key=True).order_by("pk").annotate(end=sql.log_end())
            rows = locked.filter(pk__in=sql.named(self._vendor, pairs), final=False)
            ends = {
                (at, name): (pk, end) for pk, at, name, end in rows.values_list("pk", "owner", "response_id", "end")
            }
            for owner, response_id, log in additions:
                pk, end = ends.get((owner, response_id), (0, None))
                goes_on = log.start == end
                done.append(goes_on)
                if goes_on:
                    ends[owner, response_id] = pk, log.end
                    new += (pk, log.start, log.count, log.data)
            if new:
                with connections[self._using].cursor() as cursor:
                    cursor.execute(sql.append_all(sum(done)), new)
        return done

    def find(self, **where: str) -> Record | None:
        now = self._clock()
        rows = self._read(now, self._kept(now).filter(**where))
        return record_of(rows[0]) if rows else None

    def events(self, at: str, name: str, after: int) -> Sequence[Log] | None:
        now = self._clock()
        where = {"owner": at, "id": name, "next": after + 1, "now": now}
        rows = self._read(now, self._responses.raw(sql.READ_LOG, where))
        if not rows:
            return None
        return [
            Log(row.piece_start, row.piece_count, bytes(row.piece_data)) for row in rows if row.piece_start is not None
        ]

    def chain(self, at: str, response_id: str) -> list[Record]:
        now = self._clock()
        where = {"owner": at, "id": encode_key(response_id), "now": now}
        rows = self._read(now, self._responses.raw(sql.CHAIN, where))
        by_id = {record.id: record for record in map(record_of, rows)}
        records: list[Record] = []
        following: str | None = response_id
        while following is not None and (record := by_id.pop(following, None)) is not None:
            records.append(record)
            following = record.previous_id
        records.reverse()
        return records

    def items(self, at: str, wanted: set[str]) -> Mapping[str, Record]:
        now = self._clock()
        holders = sql.holders(self._vendor, at, map(encode_key, wanted), now)
        found: dict[str, Record] = {}
        for record in map(record_of, self._read(now, self._kept(now).filter(pk__in=holders))):
            for item_id in wanted.intersection(record.item_ids):
                found[item_id] = record
        return found

    def delete(self, at: str, name: str) -> bool:
        with sql.whole(self._using):
            kept = self._kept(self._clock()).select_for_update(of=("self",))
            row = _first(kept.filter(owner=at, response_id=name).only("pk"))
            if row is None:
                return False
            forget(self._using, [row.pk])
        return True

    def cancel(self, at: str, name: str, until: float) -> bool:
        live = self._responses.filter(sql.alive(self._clock()), owner=at, response_id=name, final=False)
        with sql.alone(self._using):
            return live.update(cancelled=True, lease=Least(F("lease"), Value(until))) > 0

    def renew(self, keys: Sequence[tuple[str, str]], until: float | None) -> set[tuple[str, str]]:
        now = self._clock()
        at_work = (
            self._kept(now)
            .filter(pk__in=sql.named(self._vendor, keys), final=False, cancelled=False)
            .only("owner", "response_id", "conversation_id")
        )
        if until is None:
            with sql.alone(self._using):
                rows = list(at_work)
        else:
            with sql.whole(self._using):
                rows = list(at_work.select_for_update(of=("self",), no_key=True).order_by("pk"))
                self._responses.filter(pk__in=[row.pk for row in rows]).update(lease=until)
                self._touch(now, rows)
        return {(row.owner, row.response_id) for row in rows}

    def expired(self, until: float, limit: int) -> list[tuple[str, Record]]:
        overdue = self._kept(self._clock()).filter(final=False, lease__lt=until).order_by("lease")
        with sql.alone(self._using):
            return [(json.loads(row.head)[0], record_of(row)) for row in overdue[:limit]]

    @property
    def _responses(self) -> QuerySet[Response]:
        return Response.objects.using(self._using)

    @property
    def _conversations(self) -> QuerySet[Conversation]:
        return Conversation.objects.using(self._using)

    @property
    def _pieces(self) -> QuerySet[Piece]:
        return Piece.objects.using(self._using)

    def _all_with_expiry(self) -> QuerySet[Any]:
        return self._responses.annotate(expires=F("conversation__expires"))

    def _kept(self, now: float) -> QuerySet[Any]:
        return self._all_with_expiry().filter(expires__gt=now)

    def _read(self, now: float, rows: Iterable[Any]) -> list[Any]:
        """What a query gives, whose conversations are in use then."""
        with sql.alone(self._using):
            found = list(rows)
        if self._stale(now, found):
            with sql.whole(self._using):
                self._touch(now, found)
        return found

    def _fresh_until(self, now: float) -> float:
        return now + self._ttl * (1 - _SLACK)

    def _stale(self, now: float, rows: Iterable[Any]) -> set[int]:
        return {row.conversation_id for row in rows if row.expires < self._fresh_until(now)}

    def _touch(self, now: float, rows: Iterable[Any]) -> None:
        """Has the conversations of these live on, each locked in the order of their keys, as everybody does it."""
        if stale := self._stale(now, rows):
            locked = self._conversations.select_for_update(no_key=True).filter(pk__in=stale, expires__gt=now)
            alive = list(locked.order_by("pk").values_list("pk", flat=True))
            self._conversations.filter(pk__in=alive).update(expires=now + self._ttl)

    def _hold(self, response: Response, item_ids: Collection[str]) -> None:
        items = [Item(response=response, owner=response.owner, item_id=encode_key(item_id)) for item_id in {*item_ids}]
        Item.objects.using(self._using).bulk_create(items)

    def _columns(self, record: Record, now: float) -> dict[str, Any]:
        return columns_of(record, now + self._log_ttl if record.final else None)


def _first(rows: QuerySet[Any]) -> Any:
    return next(iter(rows[:1]), None)


def _crowded() -> StoreError:
    return StoreError("Others write the same response's events at the same time. Try again.")
