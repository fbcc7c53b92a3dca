"""SQL statements of `SqlStore`, each built once and applicable to any number of ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    Integer,
    LargeBinary,
    Select,
    Text,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from .tables import conversations, items, logs, responses

# Lists of owners and ids are passed as one JSON parameter, because databases limit the number of parameters.


def as_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """Encode the parameter `pairs` of a statement."""
    return json.dumps([*pairs])


class _Each(FunctionElement[Any]):
    """The elements of a JSON array as rows."""

    inherit_cache = True


class _Part(FunctionElement[str]):
    """An element of a JSON array, by its index, as text."""

    inherit_cache = True
    type = Text()


@compiles(_Each, "sqlite")
def _each_on_sqlite(element: _Each, compiler: SQLCompiler, **kw: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **kw)})"


@compiles(_Each, "postgresql")
def _each_on_postgres(element: _Each, compiler: SQLCompiler, **kw: Any) -> str:
    return f"json_array_elements(CAST({compiler.process(element.clauses, **kw)} AS JSON))"


@compiles(_Part, "sqlite")
def _part_on_sqlite(element: _Part, compiler: SQLCompiler, **kw: Any) -> str:
    array, number = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"json_extract({array}, '$[{number}]')"


@compiles(_Part, "postgresql")
def _part_on_postgres(element: _Part, compiler: SQLCompiler, **kw: Any) -> str:
    array, number = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({array} ->> {number})"


_given: Final = _Each(bindparam("pairs", type_=Text)).table_valued("value", name="given")
_given_owner: Final = _Part(_given.c.value, literal_column("0"))
_given_id: Final = _Part(_given.c.value, literal_column("1"))
_given_responses: Final = _given.join(responses, and_(responses.c.owner == _given_owner, responses.c.id == _given_id))


def _among(owner: ColumnElement[str], name: ColumnElement[str]) -> ColumnElement[bool]:
    return tuple_(owner, name).in_(select(_given_owner, _given_id).select_from(_given))


_owner: Final = bindparam("the_owner", type_=Text)
_now: Final = bindparam("now", type_=Double)
_until: Final = bindparam("until", type_=Double)
_limit: Final = bindparam("most", type_=Integer)
_response_id: Final = bindparam("the_id", type_=Text)
_this_record: Final = and_(responses.c.owner == _owner, responses.c.id == _response_id)
_with_key: Final = and_(responses.c.owner == _owner, responses.c.key == bindparam("the_key", type_=Text))
_its_conversation: Final = and_(conversations.c.owner == responses.c.owner, conversations.c.root == responses.c.root)
_unexpired_conversation: Final = and_(_its_conversation, conversations.c.expires > _now)
_is_unexpired: Final = exists().where(_unexpired_conversation)
_unexpired: Final = responses.join(conversations, _unexpired_conversation)

# Records, with the expiry of their conversations.

_RECORD: Final = select(
    *(responses.c[name] for name in ("owner", "root", "head", "names", "final", "cancelled", "lease", "events")),
    *(responses.c[name] for name in ("input", "response", "request")),
    conversations.c.expires,
)

GET: Final = _RECORD.select_from(_unexpired).where(_this_record)

BY_KEY: Final = _RECORD.select_from(_unexpired).where(_with_key)

_ids = select(responses.c.id, responses.c.previous).where(_this_record).cte("ids", recursive=True)
_ids = _ids.union(  # not UNION ALL, which never ends on a circular chain
    select(responses.c.id, responses.c.previous).join_from(
        responses, _ids, and_(responses.c.owner == _owner, responses.c.id == _ids.c.previous)
    )
)
CHAIN: Final = _RECORD.select_from(_unexpired).where(responses.c.owner == _owner, responses.c.id.in_(select(_ids.c.id)))

_holder: Final = (
    select(items.c.response_id)
    .select_from(
        items.join(responses, and_(responses.c.owner == items.c.owner, responses.c.id == items.c.response_id)).join(
            conversations, _unexpired_conversation
        )
    )
    .where(items.c.owner == _given_owner, items.c.item_id == _given_id)
    .limit(1)
    .correlate(_given)
    .scalar_subquery()
)
HOLDERS: Final = _RECORD.select_from(_unexpired).where(
    responses.c.owner == _owner, responses.c.id.in_(select(_holder).select_from(_given))
)

ORPHANED: Final = (
    _RECORD.select_from(_unexpired)
    .where(~responses.c.final, responses.c.lease < _until)
    .order_by(responses.c.lease)
    .limit(_limit)
)

# Writing one record.

CREATE: Final = insert(responses)
INSERT_ITEMS: Final = insert(items)

FREE_KEY: Final = update(responses).where(_with_key, ~_is_unexpired).values(key=null())

RENEW_CONVERSATION: Final = (
    update(conversations)
    .where(
        conversations.c.owner == _owner,
        conversations.c.root == select(responses.c.root).where(_this_record).scalar_subquery(),
        conversations.c.expires > _now,
    )
    .values(expires=_until)
    .returning(conversations.c.root)
)


def _start_conversation(insert: Callable[..., Any]) -> Any:
    new = insert(conversations)
    return new.on_conflict_do_update(index_elements=["owner", "root"], set_={"expires": new.excluded.expires})


START_CONVERSATION: Final = {
    "postgresql": _start_conversation(postgresql.insert),
    "sqlite": _start_conversation(sqlite.insert),
}

LOCK: Final = (
    select(responses.c.owner, responses.c.root, responses.c.final, responses.c.names, conversations.c.expires)
    .select_from(_unexpired)
    .where(_this_record)
    .with_for_update(of=responses)
)

_replaced: Final = (
    "previous", "names", "final", "lease", "logged_until", "events", "input", "response", "request"
)  # fmt: skip
REPLACE: Final = (
    update(responses)
    .where(_this_record)
    .values(
        {name: bindparam(f"new_{name}") for name in _replaced}
        | {"cancelled": or_(responses.c.cancelled, bindparam("new_cancelled", type_=Boolean))}
    )
)

DELETE_ITEMS: Final = delete(items).where(items.c.response_id == _response_id, _among(items.c.owner, items.c.item_id))

CANCEL: Final = (
    update(responses)
    .where(_this_record, ~responses.c.final, _is_unexpired)
    .values(cancelled=true(), lease=case((responses.c.lease > _until, _until), else_=responses.c.lease))
)

# Many records. Every transaction locks rows in the order of their keys, so that transactions never deadlock.

IN_PROGRESS: Final = (
    select(responses.c.owner, responses.c.id, responses.c.root, conversations.c.expires)
    .select_from(_given_responses.join(conversations, _unexpired_conversation))
    .where(~responses.c.final, ~responses.c.cancelled)
)
LOCK_IN_PROGRESS: Final = IN_PROGRESS.order_by(responses.c.owner, responses.c.id).with_for_update(
    of=responses, key_share=True
)

RENEW: Final = update(responses).where(_among(responses.c.owner, responses.c.id)).values(lease=_until)

_touched: Final = (
    select(conversations.c.owner, conversations.c.root)
    .where(_among(conversations.c.owner, conversations.c.root), conversations.c.expires > _now)
    .order_by(conversations.c.owner, conversations.c.root)
    .with_for_update()
    .cte("touched")
)
RENEW_CONVERSATIONS: Final = (
    update(conversations)
    .where(tuple_(conversations.c.owner, conversations.c.root).in_(select(_touched.c.owner, _touched.c.root)))
    .values(expires=_until)
)

# Logs.

_end: Final = func.coalesce(
    select(logs.c.start + logs.c.count)
    .where(logs.c.owner == responses.c.owner, logs.c.response_id == responses.c.id)
    .order_by(logs.c.start.desc())
    .limit(1)
    .correlate(responses)
    .scalar_subquery(),
    0,
)

LOCK_LOGS: Final = (
    select(responses.c.owner, responses.c.id, _end.label("end"))
    .select_from(_given_responses)
    .where(~responses.c.final)
    .order_by(responses.c.owner, responses.c.id)
    .with_for_update(of=responses, key_share=True)
)

APPEND: Final = insert(logs)

_start: Final = bindparam("the_start", type_=BigInteger)
_piece: Final = select(
    responses.c.owner,
    responses.c.id,
    _start,
    bindparam("the_count", type_=Integer),
    bindparam("the_data", type_=LargeBinary),
).where(_this_record, _end == _start)


def _append(piece: Select[Any]) -> Any:
    names = ["owner", "response_id", "start", "count", "data"]
    return insert(logs).from_select(names, piece).returning(logs.c.start)


APPEND_AT_END: Final = _append(_piece)
# Locks like LOCK_LOGS, in one round trip.
APPEND_SINGLE: Final = _append(_piece.where(~responses.c.final).with_for_update(of=responses, key_share=True))

_next: Final = bindparam("next", type_=BigInteger)
_earlier: Final = logs.alias("earlier")
_place: Final = func.coalesce(
    select(func.max(_earlier.c.start))
    .where(_earlier.c.owner == _owner, _earlier.c.response_id == _response_id, _earlier.c.start <= _next)
    .scalar_subquery(),
    0,
)
READ_LOG: Final = (
    select(responses.c.owner, responses.c.root, conversations.c.expires)
    .add_columns(logs.c.start, logs.c.count.label("events"), logs.c.data)
    .select_from(
        _unexpired.outerjoin(
            logs,
            and_(
                logs.c.owner == responses.c.owner,
                logs.c.response_id == responses.c.id,
                logs.c.start >= _place,
                logs.c.start + logs.c.count > _next,
            ),
        )
    )
    .where(_this_record, or_(~responses.c.final, responses.c.logged_until > _now))
    .order_by(logs.c.start)
)

# Pruning.

DELETE_RECORDS: Final = tuple(
    delete(table).where(_among(table.c.owner, name))
    for table, name in ((logs, logs.c.response_id), (items, items.c.response_id), (responses, responses.c.id))
)

EXPIRED_RECORDS: Final = (
    select(responses.c.owner, responses.c.id)
    .select_from(responses.join(conversations, _its_conversation))
    .where(conversations.c.expires <= _now)
    .limit(_limit)
    .with_for_update(of=responses, skip_locked=True)
)

DELETE_EMPTY_CONVERSATIONS: Final = delete(conversations).where(
    tuple_(conversations.c.owner, conversations.c.root).in_(
        select(conversations.c.owner, conversations.c.root)
        .where(conversations.c.expires <= _now, ~exists().where(_its_conversation))
        .limit(_limit)
        .with_for_update(skip_locked=True)
    )
)

EXPIRED_LOGS: Final = (
    select(responses.c.owner, responses.c.id)
    .where(responses.c.logged_until <= _now)
    .limit(_limit)
    .with_for_update(skip_locked=True)
)
DELETE_LOGS: Final = DELETE_RECORDS[0]
CLEAR_LOG_EXPIRY: Final = update(responses).where(_among(responses.c.owner, responses.c.id)).values(logged_until=null())

COUNT: Final = select(func.count()).select_from(responses)

_by_last_use: Final = (conversations.c.expires, conversations.c.owner, conversations.c.root)
OLDEST_CONVERSATIONS: Final = (
    select(
        *_by_last_use,
        select(func.count()).where(_its_conversation).correlate(conversations).scalar_subquery().label("held"),
    )
    .where(conversations.c.expires > _now)
    .order_by(*_by_last_use)
    .limit(_limit)
)

# By last use instead of by name, so that conversations used in the meantime stay.
_ended: Final = (
    select(conversations.c.owner, conversations.c.root)
    .where(
        conversations.c.expires > _now,
        tuple_(*_by_last_use) <= tuple_(_until, _owner, bindparam("the_root", type_=Text)),
    )
    .order_by(conversations.c.owner, conversations.c.root)
    .with_for_update()
    .cte("ended")
)
EXPIRE_CONVERSATIONS: Final = (
    update(conversations)
    .where(tuple_(conversations.c.owner, conversations.c.root).in_(select(_ended.c.owner, _ended.c.root)))
    .values(expires=0.0)
)
