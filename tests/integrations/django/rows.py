"""Rows of stored responses for tests of the admin."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import anyio

from responses_kit import ResponsesKit
from responses_kit.errors import APIError
from responses_kit.stores.key_encoding import encode_key
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend
from responses_kit.tools import HostedTool
from responses_kit_django.models import Conversation, Response

__all__ = ["create_conversation", "create_row"]


def create_conversation(
    *bodies: dict[str, Any],
    script: Sequence[Sequence[Any]] = (["Hi."],),
    owner: str = "ann",
    tools: Sequence[HostedTool] = (),
) -> list[Response]:
    """Create responses that continue each other, and return their rows."""
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(*script), store=store, tools=tools)

    async def ask() -> list[str]:
        ids: list[str] = []
        for body in bodies:
            continued = {"previous_response_id": ids[-1]} if ids else {}
            with contextlib.suppress(APIError):  # failed responses are stored, too
                await kit.create({**continued, **body}, owner=owner)
            (made,) = {record_id for _, record_id in store._final} - set(ids)
            ids.append(made)
        await kit.aclose()
        return ids

    ids = anyio.run(ask)
    conversation = Conversation.objects.create(owner=encode_key(owner), root=ids[0], expires=time.time() + 3600)
    rows = []
    for made in ids:
        record = store._final[owner, made].record
        rows.append(
            create_row(
                conversation,
                record.id,
                previous=record.previous_id,
                input=record.input.decode(),
                response=record.response.decode(),
            )
        )
    return rows


def create_row(
    conversation: Conversation | None = None,
    response_id: str = "resp_one",
    *,
    owner: str = "ann",
    previous: str | None = None,
    input: str = "[]",  # noqa: A002  # the column's name
    response: str = "{}",
    **columns: Any,
) -> Response:
    """Create a row with the given JSON."""
    if conversation is None:
        conversation = Conversation.objects.create(
            owner=encode_key(owner), root=response_id, expires=time.time() + 3600
        )
    try:
        response_object = json.loads(response)
    except (ValueError, RecursionError):
        response_object = {}
    response_object = response_object if isinstance(response_object, dict) else {}
    usage = response_object.get("usage") or {}
    return Response.objects.create(
        **{
            "conversation": conversation,
            "owner": conversation.owner,
            "response_id": response_id,
            "previous": previous,
            "head": json.dumps([conversation.owner, response_id, None, ""]),
            "names": json.dumps([previous, []]),
            "final": True,
            "cancelled": False,
            "lease": 0.0,
            "events": "none",
            "input": input,
            "response": response,
            "status": response_object.get("status", "completed"),
            "model": response_object.get("model", "scripted"),
            "background": response_object.get("background", False),
            "input_tokens": usage.get("input_tokens"),
            "output_tokens": usage.get("output_tokens"),
            "created": datetime.now(UTC),
        }
        | columns
    )
