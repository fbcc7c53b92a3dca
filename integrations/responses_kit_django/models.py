"""The tables of `OrmStore`. Only the API changes them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

__all__ = ["Conversation", "Item", "Piece", "Response"]

MAX_KEY_LENGTH = 255
"""Characters of an owner or id. `responses_kit.stores.key_encoding.encode_key` returns no longer keys."""


class Conversation(models.Model):
    """A tree of responses that continue each other, which expires as a whole."""

    owner = models.CharField(_("owner"), max_length=MAX_KEY_LENGTH)
    root = models.CharField(_("first response"), max_length=MAX_KEY_LENGTH)
    expires = models.FloatField(_("expires"))  # seconds since the epoch

    class Meta:
        verbose_name = _("conversation")
        verbose_name_plural = _("conversations")
        constraints = [
            models.UniqueConstraint(fields=["owner", "root"], name="responses_kit_conversation_root"),
        ]
        indexes = [models.Index(fields=["expires"], name="responses_kit_conv_expires")]

    def __str__(self) -> str:
        return self.root


class Response(models.Model):
    """A record of the kit, with columns for the admin's list and search."""

    conversation = models.ForeignKey(
        Conversation, on_delete=models.CASCADE, related_name="responses", verbose_name=_("conversation")
    )
    owner = models.CharField(_("owner"), max_length=MAX_KEY_LENGTH)
    response_id = models.CharField(_("id"), max_length=MAX_KEY_LENGTH)
    previous = models.CharField(_("continues"), max_length=MAX_KEY_LENGTH, null=True)
    key = models.CharField(_("idempotency key"), max_length=MAX_KEY_LENGTH, null=True)
    head = models.TextField()  # JSON that never changes: [owner, id, key, fingerprint], not encoded
    names = models.TextField()  # JSON: [previous id, [item id, ...]], not encoded
    final = models.BooleanField(_("ended"))
    cancelled = models.BooleanField(_("to be cancelled"))
    lease = models.FloatField()  # seconds since the epoch
    logged_until = models.FloatField(null=True)  # seconds since the epoch; null until it ends, and without a log
    events = models.CharField(max_length=8)  # Record.events
    input = models.TextField(_("input"))  # JSON
    response = models.TextField(_("response"))  # JSON
    request = models.BinaryField(blank=True)  # opaque bytes, for the worker

    # Copies of members of the response, for the admin.
    status = models.CharField(_("status"), max_length=20)
    model = models.CharField(_("model"), max_length=255)
    background = models.BooleanField(_("in the background"), default=False)
    input_tokens = models.BigIntegerField(_("input tokens"), null=True)
    output_tokens = models.BigIntegerField(_("output tokens"), null=True)
    created = models.DateTimeField(_("created"))

    class Meta:
        verbose_name = _("response")
        verbose_name_plural = _("responses")
        default_permissions = ("delete", "view")  # the admin neither adds nor changes responses
        constraints = [
            models.UniqueConstraint(fields=["owner", "response_id"], name="responses_kit_response_id"),
            models.UniqueConstraint(
                fields=["owner", "key"], condition=Q(key__isnull=False), name="responses_kit_response_key"
            ),
        ]
        indexes = [
            models.Index(fields=["lease"], condition=Q(final=False), name="responses_kit_response_lease"),
            models.Index(
                fields=["logged_until"], condition=Q(logged_until__isnull=False), name="responses_kit_response_log"
            ),
            models.Index(fields=["-created"], name="responses_kit_response_created"),
        ]

    def __str__(self) -> str:
        return self.response_id


class Item(models.Model):
    """An item id, and the response that has the item in its input or output."""

    response = models.ForeignKey(Response, on_delete=models.CASCADE, related_name="items")
    owner = models.CharField(max_length=MAX_KEY_LENGTH)
    item_id = models.CharField(max_length=MAX_KEY_LENGTH)

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["owner", "item_id", "response"], name="responses_kit_item_place"),
        ]


class Piece(models.Model):
    """Consecutive events of a response's log, as they are sent."""

    # The unique constraint below is an index of this column, too.
    response = models.ForeignKey(Response, on_delete=models.CASCADE, related_name="pieces", db_index=False)
    start = models.BigIntegerField()
    count = models.IntegerField()
    data = models.BinaryField()

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["response", "start"], name="responses_kit_piece_start"),
        ]
