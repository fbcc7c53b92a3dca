"""What `OrmStore.prune` does, a piece at a time, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from django.db.models import Count, Exists, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from ..models import Conversation, Piece, Response
from . import statements as sql

__all__ = ["drop_dead", "drop_empty", "drop_logs", "end_oldest", "forget"]

_AT_ONCE: Final = 500
"""Most records of one transaction that clears away."""


def forget(using: str, responses: Collection[int]) -> None:
    """Deletes responses with all that refers to them: here, and in tables of the project's own."""
    Response.objects.using(using).filter(pk__in=responses).only("pk").delete()


def drop_logs(using: str, now: float) -> int:
    """Drops logs of responses that ended long enough ago; of how many."""
    with sql.whole(using):
        over = (
            Response.objects.using(using).select_for_update(skip_locked=True, no_key=True).filter(logged_until__lte=now)
        )
        rows = [row.pk for row in over.only("pk")[:_AT_ONCE]]
        Piece.objects.using(using).filter(response__in=rows).only("pk").delete()
        Response.objects.using(using).filter(pk__in=rows).update(logged_until=None)
    return len(rows)


def drop_dead(using: str, now: float) -> int:
    """Drops responses of conversations that have expired; how many."""
    with sql.whole(using):
        dead = Response.objects.using(using).select_for_update(of=("self",), skip_locked=True)
        rows = [row.pk for row in dead.filter(conversation__expires__lte=now).only("pk")[:_AT_ONCE]]
        forget(using, rows)
    return len(rows)


def drop_empty(using: str, now: float) -> int:
    """Drops conversations that have expired and have no responses any more; how many."""
    with sql.whole(using):
        empty = (
            Conversation.objects.using(using)
            .select_for_update(skip_locked=True)
            .filter(~Exists(Response.objects.filter(conversation=OuterRef("pk"))), expires__lte=now)
        )
        rows = [row.pk for row in empty.only("pk")[:_AT_ONCE]]
        Conversation.objects.using(using).filter(pk__in=rows).delete()
    return len(rows)


def end_oldest(using: str, now: float, most: int) -> bool:
    """Lets the least recently used conversations expire, as many as hold the records that are too many."""
    with sql.alone(using):
        excess = Response.objects.using(using).count() - most
        those = Response.objects.filter(conversation=OuterRef("pk")).order_by().values("conversation")
        held = Coalesce(Subquery(those.annotate(count=Count("pk")).values("count")), 0)
        alive = Conversation.objects.using(using).filter(expires__gt=now).annotate(held=held).order_by("expires", "pk")
        rows = list(alive[:_AT_ONCE]) if excess > 0 else []
    last = None
    for row in rows:
        last = row
        excess -= row.held
        if excess <= 0:
            break
    if last is None:
        return False
    # By the time of their last use rather than by name, so that who was used meanwhile stays.
    oldest = Q(expires__lt=last.expires) | Q(expires=last.expires, pk__lte=last.pk)
    with sql.whole(using):
        locked = (
            Conversation.objects.using(using)
            .select_for_update(no_key=True)
            .filter(oldest, expires__gt=now)
            .order_by("pk")
        )
        ended = list(locked.values_list("pk", flat=True))
        Conversation.objects.using(using).filter(pk__in=ended).update(expires=0.0)
    return True
