"""The steps of `OrmStore.prune`. Each call handles one batch in its own transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from django.db.models import Count, Exists, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from ..models import Conversation, Piece, Response
from . import statements as sql

__all__ = ["delete_empty_conversations", "delete_expired_responses", "delete_logs", "delete_responses", "expire_oldest"]

_BATCH_SIZE: Final = 500
"""Rows that one transaction deletes or updates, so that it holds locks for a short time."""


def delete_responses(using: str, responses: Collection[int]) -> None:
    """Delete responses and all rows that refer to them, including rows of the project's own models."""
    Response.objects.using(using).filter(pk__in=responses).only("pk").delete()


def delete_logs(using: str, now: float) -> int:
    """Delete expired logs, and return of how many responses."""
    with sql.atomic(using):
        expired = (
            Response.objects.using(using).select_for_update(skip_locked=True, no_key=True).filter(logged_until__lte=now)
        )
        rows = [row.pk for row in expired.only("pk")[:_BATCH_SIZE]]
        Piece.objects.using(using).filter(response__in=rows).only("pk").delete()
        Response.objects.using(using).filter(pk__in=rows).update(logged_until=None)
    return len(rows)


def delete_expired_responses(using: str, now: float) -> int:
    """Delete responses of expired conversations, and return how many."""
    with sql.atomic(using):
        locked = Response.objects.using(using).select_for_update(of=("self",), skip_locked=True)
        rows = [row.pk for row in locked.filter(conversation__expires__lte=now).only("pk")[:_BATCH_SIZE]]
        delete_responses(using, rows)
    return len(rows)


def delete_empty_conversations(using: str, now: float) -> int:
    """Delete expired conversations that have no responses, and return how many."""
    with sql.atomic(using):
        empty = (
            Conversation.objects.using(using)
            .select_for_update(skip_locked=True)
            .filter(~Exists(Response.objects.filter(conversation=OuterRef("pk"))), expires__lte=now)
        )
        rows = [row.pk for row in empty.only("pk")[:_BATCH_SIZE]]
        Conversation.objects.using(using).filter(pk__in=rows).delete()
    return len(rows)


def expire_oldest(using: str, now: float, max_records: int) -> bool:
    """Expire the least recently used conversations that hold the records above a maximum, and return whether any did.

    One call expires one batch at most.
    """
    with sql.autocommit(using):
        excess = Response.objects.using(using).count() - max_records
        responses = Response.objects.filter(conversation=OuterRef("pk")).order_by().values("conversation")
        held = Coalesce(Subquery(responses.annotate(count=Count("pk")).values("count")), 0)
        alive = Conversation.objects.using(using).filter(expires__gt=now).annotate(held=held).order_by("expires", "pk")
        rows = list(alive[:_BATCH_SIZE]) if excess > 0 else []
    last = None
    for row in rows:
        last = row
        excess -= row.held
        if excess <= 0:
            break
    if last is None:
        return False
    # By their expiry and not by their keys, so that conversations which have been used meanwhile stay.
    oldest = Q(expires__lt=last.expires) | Q(expires=last.expires, pk__lte=last.pk)
    with sql.atomic(using):
        locked = (
            Conversation.objects.using(using)
            .select_for_update(no_key=True)
            .filter(oldest, expires__gt=now)
            .order_by("pk")
        )
        ended = list(locked.values_list("pk", flat=True))
        Conversation.objects.using(using).filter(pk__in=ended).update(expires=0.0)
    return True
