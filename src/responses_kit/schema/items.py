"""Items, the units of input and output (specification, "Items").

The same models serve both directions. On input they accept the variants that clients and servers send, such as
messages without a type, strings as content, nulls and unknown statuses. On output they follow the specification.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag, TypeAdapter, ValidationError

from .base import MAX_ITEMS, Optional, Text, WireModel, bounded
from .content import InputText, ModelPart, Part, ReasoningText, SummaryText, UserPart, parts_as

Status = Annotated[
    Literal["in_progress", "completed", "incomplete"],
    BeforeValidator(lambda value: value if value in ("in_progress", "incomplete") else "completed"),
]
"""An item's status; unknown values count as completed."""

Id = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
"""An item's id; empty until the context assigns one."""

CallId = Annotated[str, Field(min_length=1, max_length=64)]
"""Pairs a call with its output."""

TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")]
"""A function's name."""


EXTENSION_TYPE: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}:[a-zA-Z0-9_.:/-]{1,128}")
ExtensionType = Annotated[str, Field(pattern=f"^{EXTENSION_TYPE.pattern}$")]
"""An extension type, `slug:name`."""


class Message(WireModel):
    """A message; subclasses restrict the role and the content."""

    type: Literal["message"] = "message"
    id: Id = ""
    status: Status = "completed"
    role: Literal["user", "system", "developer", "assistant"]
    content: Sequence[Part]

    @property
    def text(self) -> str:
        """All text of the message in one string."""
        return "".join(part.plain for part in self.content)


class UserMessage(Message):
    """A message from the user, with text, images, files and videos."""

    role: Literal["user"] = "user"
    content: Annotated[list[UserPart], bounded(MAX_ITEMS), parts_as("input_text")]


class SystemMessage(Message):
    """A message from the system or the developer, with text only."""

    role: Literal["system", "developer"]
    content: Annotated[list[InputText], bounded(MAX_ITEMS), parts_as("input_text")]


class AssistantMessage(Message):
    """A message from the model; `phase` distinguishes commentary from the final answer."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[list[ModelPart], bounded(MAX_ITEMS), parts_as("output_text")]
    phase: Optional[Literal["commentary", "final_answer"]] = None


class FunctionCall(WireModel):
    """The model's call of a function. `arguments` is the model's text, which may not be valid JSON."""

    type: Literal["function_call"] = "function_call"
    id: Id = ""
    call_id: CallId
    name: ToolName
    arguments: str
    status: Status = "completed"


def _output_kind(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~parts"


UNPAIRED: Final = "unpaired"
"""The `call_id` of an output that a client sent without one, until the context assigns one."""


class FunctionCallOutput(WireModel):
    """The result of a function, as text or as parts.

    Some clients send outputs without a preceding call. Such an output has a `name` and also represents the call.
    """

    type: Literal["function_call_output"] = "function_call_output"
    id: Id = ""
    call_id: CallId
    name: Optional[ToolName] = None
    output: Annotated[
        Annotated[Text, Tag("~text")] | Annotated[list[UserPart], bounded(MAX_ITEMS), Tag("~parts")],
        Discriminator(_output_kind),
    ]
    status: Status = "completed"


class Reasoning(WireModel):
    """The model's reasoning: raw, summarized or encrypted."""

    type: Literal["reasoning"] = "reasoning"
    id: Id = ""
    status: Status = "completed"
    summary: Annotated[list[SummaryText], bounded(MAX_ITEMS), parts_as("summary_text")] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], bounded(MAX_ITEMS), parts_as("reasoning_text")] = Field(
        default_factory=list
    )
    encrypted_content: Optional[Text] = None

    @property
    def text(self) -> str:
        """The raw reasoning, empty if it is not known."""
        return "".join(part.text for part in self.content)


class Compaction(WireModel):
    """An encrypted summary of an earlier part of the conversation."""

    type: Literal["compaction"] = "compaction"
    id: Id = ""
    encrypted_content: Text
    _summary: str = PrivateAttr("")

    @property
    def summary(self) -> str:
        """The decrypted summary, empty until the context sets it. It is never serialized."""
        return self._summary

    def with_summary(self, summary: str) -> Compaction:
        """Return a copy with the decrypted summary."""
        item = self.model_copy()
        item._summary = summary
        return item


class ExtensionItem(WireModel):
    """An item of an extension type, `slug:name`, with all its members."""

    model_config = ConfigDict(extra="allow")

    type: ExtensionType
    id: Id = ""
    status: Annotated[str, BeforeValidator(lambda value: "completed" if value in (None, "") else value)] = "completed"

    def receipt(self) -> tuple[FunctionCall, FunctionCallOutput] | None:
        """Return the call and the output that a hosted tool's receipt represents; None if this is not a receipt.

        A receipt has the strings `name`, `arguments` and `output`, and a `call_id` that pairs the two.
        """
        members = self.__pydantic_extra__ or {}
        call = {name: members.get(name) for name in ("call_id", "name", "arguments")}
        output = {name: members.get(name) for name in ("call_id", "output")}
        try:
            pair = FunctionCall.model_validate(call), FunctionCallOutput.model_validate(output)
        except ValidationError:
            return None
        return pair if isinstance(pair[1].output, str) else None


class ItemReference(WireModel):
    """A reference to an item of a stored response of the same owner."""

    type: Literal["item_reference"] = "item_reference"
    id: Annotated[str, Field(min_length=1)]


_ROLES = {"user": "~user", "assistant": "~assistant", "system": "~system", "developer": "~system"}


def _item_kind(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        value = {"type": getattr(value, "type", None), "role": getattr(value, "role", None)}
    kind, role = value.get("type"), value.get("role")
    if kind is None:
        kind = "message" if role is not None else "item_reference" if "id" in value else None
    if kind == "message":
        return _ROLES.get(role) if isinstance(role, str) else None
    if isinstance(kind, str):
        return "~extension" if ":" in kind else f"~{kind}"
    return None


def _typed(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    # A null type counts as omitted, but the models' literals do not accept null.
    if "type" in value and value["type"] is None:
        value = {key: member for key, member in value.items() if key != "type"}
    is_unpaired = value.get("type") == "function_call_output" and not value.get("call_id")
    return {**value, "call_id": UNPAIRED} if is_unpaired and value.get("name") else value


_Item = (
    Annotated[UserMessage, Tag("~user")]
    | Annotated[SystemMessage, Tag("~system")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[FunctionCall, Tag("~function_call")]
    | Annotated[FunctionCallOutput, Tag("~function_call_output")]
    | Annotated[Reasoning, Tag("~reasoning")]
    | Annotated[Compaction, Tag("~compaction")]
    | Annotated[ExtensionItem, Tag("~extension")]
)

Item = Annotated[_Item, Discriminator(_item_kind)]
"""Any item of a context or an output."""

InputItem = Annotated[
    _Item | Annotated[ItemReference, Tag("~item_reference")],
    Discriminator(_item_kind),
    BeforeValidator(_typed),
]
"""Any item of a request, or a reference to one."""

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
"""Validates and serializes lists of items."""
