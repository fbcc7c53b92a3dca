"""What `OrmStore` keeps, as tables of the project's database. The API is what changes them; nothing else should."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

__all__ = ["Conversation", "Item", "Piece", "Response"]

LONGEST_KEY = 255
"""Characters of an owner or id; `responses_kit.stores.key_encoding.encode_key` makes no longer ones."""


class Conversation(models.Model):
    """Responses that continue each other, a tree of them, which expires as a whole."""

    owner = models.CharField(_("owner"), max_length=LONGEST_KEY)
    root = models.CharField(_("first response"), max_length=LONGEST_KEY)
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
    """One response: a record of the kit's, with what people look for beside it."""

    conversation = models.ForeignKey(
        Conversation, on_delete=models.CASCADE, related_name="responses", verbose_name=_("conversation")
    )
    owner = models.CharField(_("owner"), max_length=LONGEST_KEY)
    response_id = models.CharField(_("id"), max_length=LONGEST_KEY)
    previous = models.CharField(_("continues"), max_length=LONGEST_KEY, null=True)
    key = models.CharField(_("idempotency key"), max_length=LONGEST_KEY, null=True)
    head = models.TextField()  # JSON, what never changes: [owner, id, key, fingerprint], in full
    names = models.TextField()  # JSON: [previous id, [item id, ...]], in full
    final = models.BooleanField(_("ended"))
    cancelled = models.BooleanField(_("to be cancelled"))
    lease = models.FloatField()  # seconds since the epoch
    logged_until = models.FloatField(null=True)  # of one that has ended and whose events are kept
    events = models.CharField(max_length=4)  # as in Record
    input = models.TextField(_("input"))  # JSON
    response = models.TextField(_("response"))  # JSON
    request = models.BinaryField(blank=True)  # bytes to all but the worker that takes them

    # What stands in the response, too, to be looked for.
    status = models.CharField(_("status"), max_length=20)
    model = models.CharField(_("model"), max_length=255)
    background = models.BooleanField(_("in the background"), default=False)
    input_tokens = models.BigIntegerField(_("input tokens"), null=True)
    output_tokens = models.BigIntegerField(_("output tokens"), null=True)
    created = models.DateTimeField(_("created"))

    class Meta:
        verbose_name = _("response")
        verbose_name_plural = _("responses")
        default_permissions = ("delete", "view")  # nobody adds or changes one by hand
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
    """Where the item with an id is: in the input or output of a response."""

    response = models.ForeignKey(Response, on_delete=models.CASCADE, related_name="items")
    owner = models.CharField(max_length=LONGEST_KEY)
    item_id = models.CharField(max_length=LONGEST_KEY)

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["owner", "item_id", "response"], name="responses_kit_item_place"),
        ]


class Piece(models.Model):
    """A part of a response's log: consecutive events, as they were told."""

    # The constraint is its index, too.
    response = models.ForeignKey(Response, on_delete=models.CASCADE, related_name="pieces", db_index=False)
    start = models.BigIntegerField()
    count = models.IntegerField()
    data = models.BinaryField()

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["response", "start"], name="responses_kit_piece_start"),
        ]
