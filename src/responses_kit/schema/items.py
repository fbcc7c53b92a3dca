"""Items: the units of context, in and out (specification, "Items").

The same models serve both ways. Coming in, they take every shape that clients and other servers send: no
type on messages, strings for content, nulls, statuses. What they hold and show is exact.
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
"""An item's lifecycle state; input that says nothing useful counts as completed."""

Id = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
"""An item's id; empty until the context gives it one."""

CallId = Annotated[str, Field(min_length=1, max_length=64)]
"""Pairs a call with its output."""

TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")]
"""A function's name."""


EXTENSION_TYPE: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}:[a-zA-Z0-9_.:/-]{1,128}")
ExtensionType = Annotated[str, Field(pattern=f"^{EXTENSION_TYPE.pattern}$")]
"""An implementor's own type, `slug:name`."""


class Message(WireModel):
    """What someone said. The subclass says who may: user, system and developer, or the assistant."""

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
    """A message from the user: text, pictures, files."""

    role: Literal["user"] = "user"
    content: Annotated[list[UserPart], bounded(MAX_ITEMS), parts_as("input_text")]


class SystemMessage(Message):
    """A message from the system or the developer: text alone."""

    role: Literal["system", "developer"]
    content: Annotated[list[InputText], bounded(MAX_ITEMS), parts_as("input_text")]


class AssistantMessage(Message):
    """A message from the model. `phase` tells remarks on the way from the final answer."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[list[ModelPart], bounded(MAX_ITEMS), parts_as("output_text")]
    phase: Optional[Literal["commentary", "final_answer"]] = None


class FunctionCall(WireModel):
    """The model's call of a function. `arguments` is JSON as far as the model wrote JSON."""

    type: Literal["function_call"] = "function_call"
    id: Id = ""
    call_id: CallId
    name: ToolName
    arguments: str
    status: Status = "completed"


def _output_kind(value: Any) -> str:
    return "~text" if isinstance(value, str) else "~parts"


UNPAIRED: Final = "unpaired"
"""The call_id of an output whose client sent none, until the context gives it one."""


class FunctionCallOutput(WireModel):
    """What a function returned, as text or as parts.

    Some clients tell the model what no call asked for: their outputs have a `name`, and stand for a call as well.
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
    """What the model thought: raw, as a summary, or sealed."""

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
        """The raw reasoning, as far as it is known."""
        return "".join(part.text for part in self.content)


class Compaction(WireModel):
    """A sealed summary of an earlier part of the conversation."""

    type: Literal["compaction"] = "compaction"
    id: Id = ""
    encrypted_content: Text
    _summary: str = PrivateAttr("")

    @property
    def summary(self) -> str:
        """The summary in plain text, once the context has opened it. No request and no response carries it."""
        return self._summary

    def opened(self, summary: str) -> Compaction:
        """A copy that shows its summary."""
        item = self.model_copy()
        item._summary = summary
        return item


class ExtensionItem(WireModel):
    """An item of an implementor's own type, `slug:name`; all its members are kept."""

    model_config = ConfigDict(extra="allow")

    type: ExtensionType
    id: Id = ""
    status: Annotated[str, BeforeValidator(lambda value: "completed" if value in (None, "") else value)] = "completed"

    def receipt(self) -> tuple[FunctionCall, FunctionCallOutput] | None:
        """The call and the output that a hosted tool's receipt stands for; None if this is no receipt.

        A receipt has `name`, `arguments` and `output`, all strings, and a `call_id` that pairs the two.
        """
        told = self.__pydantic_extra__ or {}
        call = {name: told.get(name) for name in ("call_id", "name", "arguments")}
        output = {name: told.get(name) for name in ("call_id", "output")}
        try:
            pair = FunctionCall.model_validate(call), FunctionCallOutput.model_validate(output)
        except ValidationError:
            return None
        return pair if isinstance(pair[1].output, str) else None


class ItemReference(WireModel):
    """Stands for an item that this owner's stored responses hold."""

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
    # A null type says the same as none; the models' literals know only the latter.
    if isinstance(value, Mapping) and "type" in value and value["type"] is None:
        value = {key: member for key, member in value.items() if key != "type"}
    unpaired = isinstance(value, Mapping) and value.get("type") == "function_call_output" and not value.get("call_id")
    return {**value, "call_id": UNPAIRED} if unpaired and value.get("name") else value


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
"""Any item that can stand in a context or an output."""

InputItem = Annotated[
    _Item | Annotated[ItemReference, Tag("~item_reference")],
    Discriminator(_item_kind),
    BeforeValidator(_typed),
]
"""What a request may send: any item, or a reference to one."""

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
"""Reads and writes lists of items, such as a stored response's."""
