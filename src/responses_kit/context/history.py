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
    """The conversation that a request continues.

    Attributes:
        items: Earlier responses' input and output, then the request's own input, in order and decrypted.
        input_items: The items of `input` with ids and with references replaced by the stored items, still encrypted.
    """

    items: list[Item]
    input_items: list[Item]


async def load_conversation(
    request: CreateRequest | CompactRequest, model: Model, *, owner: str, store: History, encryptor: Encryptor
) -> Conversation:
    """Load earlier responses and referenced items, and decrypt payloads.

    Args:
        request: The validated request.
        model: The model that answers.
        owner: The owner of the request, and of the responses and items that it may refer to.
        store: The store of earlier responses.
        encryptor: Decrypts payloads that clients carry.

    Raises:
        InvalidRequest: A response or item does not exist, a payload cannot be decrypted, or the model does not support
            the content. `param` is the path of the invalid parameter.
        StoreError: The store failed, or a stored response cannot be read.
    """
    previous = request.previous_response_id
    if previous is not None and not model.conversations:
        raise UnsupportedParameter(
            "This model does not support 'previous_response_id'. Send the conversation in 'input'.",
            param="previous_response_id",
        )
    earlier = await _load_chain(previous, owner, store) if previous is not None else []
    input_items = await _resolve_input(request.input, earlier, owner, store)
    _check_call_ids(earlier, input_items)
    if not model.vision:
        check_text_only(earlier, input_items)
    items = [*earlier, *input_items.values()]
    return Conversation(
        _decrypt_items(items, len(earlier), list(input_items), owner, encryptor), list(input_items.values())
    )


_MAX_CONVERSATION_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of a conversation, in bytes of stored responses with their input. Bounds memory per request."""


async def _load_chain(response_id: str, owner: str, store: History) -> list[Item]:
    records = await call_store(store.chain(owner, response_id))
    if not records:
        raise PreviousResponseNotFound
    if records[0].previous_id is not None:
        raise PreviousResponseNotFound(
            "An earlier response of the conversation was deleted or has expired. Send the conversation in 'input'."
        )
    if sum(record.size for record in records) > _MAX_CONVERSATION_BYTES:
        raise ContextLengthExceeded(
            "The conversation exceeds the server's limit. Compact it, or start a new one.",
            param="previous_response_id",
        )
    if not records[-1].final:
        raise InvalidRequest(
            "The previous response is still in progress. Wait until it has ended.",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    items: list[Item] = []
    seen: set[str] = set()
    for record in records:
        for item in _decode_items(record):
            if item.id not in seen:
                seen.add(item.id)
                items.append(item)
    return items


def _decode_items(record: Record) -> list[Item]:
    try:
        return [*ITEMS.validate_json(record.input), *ITEMS.validate_python(from_json(record.response)["output"])]
    except (ValueError, KeyError) as error:
        raise StoreError("A stored response cannot be read. Send the conversation in 'input'.") from error


async def _resolve_input(
    request_input: str | Sequence[InputItem] | None, earlier: Sequence[Item], owner: str, store: History
) -> dict[int, Item]:
    """Return the request's own items by their position in `input`, without those in earlier responses."""
    if request_input is None:
        return {}
    if isinstance(request_input, str):
        return {0: UserMessage.model_validate({"id": new_id("msg"), "content": request_input})}
    earlier_ids = {item.id for item in earlier}
    # A reference to an earlier item, or to an item in the same request, adds nothing.
    present_ids = earlier_ids | {item.id for item in request_input if not isinstance(item, ItemReference)}
    missing_ids = {item.id for item in request_input if isinstance(item, ItemReference) and is_id(item.id)}
    missing_ids -= present_ids
    stored_items = await _stored_items(missing_ids, owner, store) if missing_ids else {}
    items: dict[int, Item] = {}
    used_ids: set[str] = set()
    for position, item in enumerate(request_input):
        if isinstance(item, ItemReference):
            if item.id not in present_ids:
                present_ids.add(item.id)
                items[position] = _find_referenced(stored_items, item.id, position)
        elif not item.id or item.id not in earlier_ids:
            # Items that the server has sent keep their ids; ids must be unique within the response.
            items[position] = item if is_id(item.id) and item.id not in used_ids else _assign_id(item)
            used_ids.add(item.id)
            if isinstance(item, FunctionCallOutput) and item.call_id == UNPAIRED and item.name is not None:
                items[position] = items[position].model_copy(update={"call_id": new_id("call")})
    return items


def _assign_id(item: Item) -> Item:
    return item.model_copy(update={"id": new_id(_ID_PREFIXES.get(item.type, "item"))})


_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}


async def _stored_items(ids: Set[str], owner: str, store: History) -> dict[str, Item]:
    records = await call_store(store.items(owner, ids))
    distinct = {record.id: record for record in records.values()}  # many items may be in one record
    return {item.id: item for record in distinct.values() for item in _decode_items(record)}


def _find_referenced(items: Mapping[str, Item], item_id: str, position: int) -> Item:
    item = items.get(item_id)
    if item is None:
        raise InvalidRequest(
            f"'input[{position}].id' is not the id of a stored item. Send the item itself.",
            param=f"input[{position}].id",
            code="item_not_found",
        )
    return item


def _check_call_ids(earlier: Sequence[Item], input_items: Mapping[int, Item]) -> None:
    outputs = {position: item for position, item in input_items.items() if isinstance(item, FunctionCallOutput)}
    if not outputs:
        return
    calls = {item.call_id for item in (*earlier, *input_items.values()) if isinstance(item, FunctionCall)}
    for position, output in outputs.items():
        if output.call_id not in calls and output.name is None:
            raise InvalidRequest(
                f"No function call in the conversation has the call_id {output.call_id!r}.",
                param=f"input[{position}].call_id",
                code="function_call_not_found",
            )


def _decrypt_items(
    items: Sequence[Item], earlier: int, positions: Sequence[int], owner: str, encryptor: Encryptor
) -> list[Item]:
    """Return the items with their encrypted reasoning and summaries decrypted.

    Args:
        items: The items of earlier responses, then the request's own.
        earlier: The number of items of earlier responses.
        positions: The positions of the request's own items in `input`.
        owner: The owner of the request.
        encryptor: Decrypts the payloads.
    """
    decrypted: list[Item] = []
    for index, item in enumerate(items):
        input_index = index - earlier
        param = "previous_response_id" if input_index < 0 else f"input[{positions[input_index]}].encrypted_content"
        if isinstance(item, Reasoning) and item.encrypted_content and not item.content:
            text = encryptor.decrypt(item.encrypted_content, kind="reasoning", owner=owner, param=param)
            if text is not None:
                item = item.model_copy(update={"content": [ReasoningText(text=text)]})
        elif isinstance(item, Compaction):
            item = item.with_summary(_decrypt_summary(item, owner, encryptor, param))
        decrypted.append(item)
    return decrypted


def _decrypt_summary(item: Compaction, owner: str, encryptor: Encryptor, param: str) -> str:
    """Return the summary of a compaction.

    Raises:
        InvalidRequest: The payload cannot be decrypted or holds no summary. Omitting it would leave the conversation
            incomplete.
    """
    try:
        summary = from_json(
            encryptor.decrypt(item.encrypted_content, kind="compaction", owner=owner, param=param) or ""
        )
        if isinstance(summary["summary"], str):
            return summary["summary"]
    except (InvalidRequest, ValueError, KeyError, TypeError):
        pass
    raise InvalidRequest(
        f"The compaction in '{param}' cannot be decrypted. Send the messages that it replaces.",
        param=param,
        code="invalid_encrypted_content",
    )
