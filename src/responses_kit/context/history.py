"""The conversation of a request: earlier responses, item references and its own input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from pydantic_core import from_json

from ..backend import Model
from ..errors import (
    ContextLengthExceeded,
    InvalidRequest,
    PreviousResponseNotFound,
    StoreError,
    UnsupportedParameter,
)
from ..protocol.encryption import Encryptor
from ..protocol.ids import is_id, new_id
from ..schema.content import ReasoningText
from ..schema.items import (
    ITEMS,
    UNPAIRED,
    Compaction,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    Item,
    ItemReference,
    Reasoning,
    UserMessage,
)
from ..schema.request import CompactRequest, CreateRequest
from ..stores.protocol import History, Record, call_store
from .capabilities import check_text_only

__all__ = ["Conversation", "load_conversation"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request is about.

    Attributes:
        items: Earlier responses' input and output, then the request's own input, in order and opened.
        own: The request's own input items, with ids, as they came.
    """

    items: list[Item]
    own: list[Item]


async def load_conversation(
    request: CreateRequest | CompactRequest, model: Model, *, owner: str, store: History, encryptor: Encryptor
) -> Conversation:
    """Gathers what a request refers to and what it brings along, and opens what is sealed.

    Args:
        request: The validated request.
        model: Who is asked.
        owner: Whose responses and items may be referred to.
        store: Where earlier responses are.
        encryptor: Decrypts payloads that the client carries.

    Raises:
        InvalidRequest: The request refers to what does not exist, holds what cannot be opened here, or what the
            model cannot read; `param` names the field.
    """
    previous = request.previous_response_id
    if previous is not None and not model.conversations:
        raise UnsupportedParameter(
            "This model does not go on from earlier responses. Send everything in input.", param="previous_response_id"
        )
    earlier = await _chain(previous, owner, store) if previous is not None else []
    own = await _own_items(request.input, earlier, owner, store)
    _check_pairs(earlier, own)
    if not model.vision:
        check_text_only(earlier, own)
    items = [*earlier, *own.values()]
    return Conversation(_opened(items, len(earlier), list(own), owner, encryptor), list(own.values()))


_LONGEST_CONVERSATION: Final = 64 * 1024 * 1024
"""Bytes of all responses that one continues, with their input."""


async def _chain(response_id: str, owner: str, store: History) -> list[Item]:
    records = await call_store(store.chain(owner, response_id))
    if not records:
        raise PreviousResponseNotFound
    if records[0].previous_id is not None:
        raise PreviousResponseNotFound(
            "An earlier response of this conversation was deleted or has expired. Send the conversation in input."
        )
    # No conversation can become longer than this and one more turn, so that none can fill the memory.
    if sum(record.size for record in records) > _LONGEST_CONVERSATION:
        raise ContextLengthExceeded(
            "The conversation is longer than this server takes. Compact it, or begin anew.",
            param="previous_response_id",
        )
    if not records[-1].final:
        raise InvalidRequest(
            "The previous response is still in progress. Wait for its end before you continue it.",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    items: list[Item] = []
    seen: set[str] = set()
    for record in records:
        for item in _items_of(record):
            if item.id not in seen:
                seen.add(item.id)
                items.append(item)
    return items


def _items_of(record: Record) -> list[Item]:
    try:
        return [*ITEMS.validate_json(record.input), *ITEMS.validate_python(from_json(record.response)["output"])]
    except (ValueError, KeyError) as error:
        raise StoreError("A stored response cannot be read. Send the conversation in input instead.") from error


async def _own_items(
    given: str | Sequence[InputItem] | None, earlier: Sequence[Item], owner: str, store: History
) -> dict[int, Item]:
    """The request's own items by their position in `input`; what the model knows already is left out."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {0: UserMessage.model_validate({"id": new_id("msg"), "content": given})}
    known = {item.id for item in earlier}
    # A reference to an item that is sent along, or to one that is known, adds nothing.
    skipped = known | {item.id for item in given if not isinstance(item, ItemReference)}
    wanted = {item.id for item in given if isinstance(item, ItemReference) and is_id(item.id)} - skipped
    stored_items = await _stored_items(wanted, owner, store) if wanted else {}
    items: dict[int, Item] = {}
    kept: set[str] = set()
    for position, item in enumerate(given):
        if isinstance(item, ItemReference):
            if item.id not in skipped:
                skipped.add(item.id)
                items[position] = _referenced(stored_items, item.id, position)
        elif not item.id or item.id not in known:
            # An id of ours comes back with the item that we gave it to; it stands for one item only.
            items[position] = item if is_id(item.id) and item.id not in kept else _with_id(item)
            kept.add(item.id)
            if isinstance(item, FunctionCallOutput) and item.call_id == UNPAIRED and item.name is not None:
                items[position] = items[position].model_copy(update={"call_id": new_id("call")})
    return items


def _with_id(item: Item) -> Item:
    return item.model_copy(update={"id": new_id(_PREFIXES.get(item.type, "item"))})


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}


async def _stored_items(ids: Set[str], owner: str, store: History) -> dict[str, Item]:
    records = await call_store(store.items(owner, ids))
    distinct = {record.id: record for record in records.values()}  # many items may be in one record
    return {item.id: item for record in distinct.values() for item in _items_of(record)}


def _referenced(items: Mapping[str, Item], item_id: str, position: int) -> Item:
    item = items.get(item_id)
    if item is None:
        raise InvalidRequest(
            "The item_reference names no stored item. Send the item itself.",
            param=f"input[{position}].id",
            code="item_not_found",
        )
    return item


def _check_pairs(earlier: Sequence[Item], own: Mapping[int, Item]) -> None:
    outputs = {position: item for position, item in own.items() if isinstance(item, FunctionCallOutput)}
    if not outputs:
        return
    calls = {item.call_id for item in (*earlier, *own.values()) if isinstance(item, FunctionCall)}
    for position, output in outputs.items():
        if output.call_id not in calls and output.name is None:
            raise InvalidRequest(
                f"No function call with the call_id {output.call_id!r} stands in the context of this output.",
                param=f"input[{position}].call_id",
                code="function_call_not_found",
            )


def _opened(
    items: Sequence[Item], earlier: int, positions: Sequence[int], owner: str, encryptor: Encryptor
) -> list[Item]:
    """The items, with the reasoning and the summaries in them that were sealed for the client to carry."""
    opened: list[Item] = []
    for index, item in enumerate(items):
        own = index - earlier
        param = "previous_response_id" if own < 0 else f"input[{positions[own]}].encrypted_content"
        if isinstance(item, Reasoning) and item.encrypted_content and not item.content:
            text = encryptor.decrypt(item.encrypted_content, kind="reasoning", owner=owner, param=param)
            if text is not None:
                item = item.model_copy(update={"content": [ReasoningText(text=text)]})
        elif isinstance(item, Compaction):
            item = item.opened(_summary(item, owner, encryptor, param))
        opened.append(item)
    return opened


def _summary(item: Compaction, owner: str, encryptor: Encryptor, param: str) -> str:
    """What a compaction stands for. Without it a conversation would lose its past, so there is no going on."""
    try:
        summary = from_json(
            encryptor.decrypt(item.encrypted_content, kind="compaction", owner=owner, param=param) or ""
        )
        if isinstance(summary["summary"], str):
            return summary["summary"]
    except (InvalidRequest, ValueError, KeyError, TypeError):
        pass
    raise InvalidRequest(
        "This compaction cannot be opened here: it was changed, or it comes from another server or user. "
        "Send the messages that it stands for, or compact them here.",
        param=param,
        code="invalid_encrypted_content",
    )
