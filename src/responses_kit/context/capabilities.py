"""Refusals of requests that a model or this server cannot honour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backend import Model
from ..errors import (
    InvalidRequest,
    UnsupportedParameter,
)
from ..schema.content import InputFile, InputImage, InputVideo
from ..schema.items import (
    FunctionCallOutput,
    Item,
    Message,
)
from ..schema.request import CreateRequest, JsonObject, JsonSchema, PlainText, TextFormat

__all__ = ["check_capabilities", "check_text_only", "requested_format", "wants_logprobs"]


def check_capabilities(request: CreateRequest, model: Model) -> None:
    """Refuse a request that the model, or this server, cannot honour.

    Raises:
        InvalidRequest: The request contradicts itself; `param` names the field.
        UnsupportedParameter: The request asks for a feature that is not available; `param` names the field.
    """
    if request.background and not request.store:
        raise InvalidRequest("A background response is one that is kept: leave store out, or true.", param="background")
    for field in ("conversation", "prompt"):
        # Not of this specification; but clients of its model know them, and an answer without them would be wrong.
        if getattr(request, field) is not None:
            raise UnsupportedParameter(f"There is no {field} here. Send everything in input.", param=field)
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise UnsupportedParameter("Obfuscation is not available here.", param="stream_options.include_obfuscation")
    if not model.structured_output and requested_format(request).type != "text":
        raise UnsupportedParameter("This model cannot be held to a format.", param="text.format")
    if not model.logprobs and wants_logprobs(request):
        param = "top_logprobs" if request.top_logprobs else "include"
        raise UnsupportedParameter("This model gives no log probabilities.", param=param)
    if not model.reasoning and request.reasoning is not None and request.reasoning.effort not in (None, "none"):
        raise UnsupportedParameter("This model does not reason.", param="reasoning.effort")


def wants_logprobs(request: CreateRequest) -> bool:
    """Return whether the request asks for log probabilities."""
    return bool(request.top_logprobs) or "message.output_text.logprobs" in request.include


def check_text_only(earlier: Sequence[Item], own: Mapping[int, Item]) -> None:
    """Refuse items that hold images, files or video.

    Args:
        earlier: Items of earlier responses.
        own: The request's own items by their position in `input`.

    Raises:
        UnsupportedParameter: An item holds such a part; `param` names it.
    """
    for item in earlier:
        if _picture(item):
            raise UnsupportedParameter(_TEXT_ONLY, param="previous_response_id")
    for position, item in own.items():
        if place := _picture(item):
            raise UnsupportedParameter(_TEXT_ONLY, param=f"input[{position}].{place}")


_TEXT_ONLY = "This model reads text only."


def _picture(item: Item) -> str | None:
    """Where an item holds what is no text, such as `content[1]`."""
    if isinstance(item, Message):
        field, parts = "content", item.content
    elif isinstance(item, FunctionCallOutput) and not isinstance(item.output, str):
        field, parts = "output", item.output
    else:
        return None
    for index, part in enumerate(parts):
        if isinstance(part, InputImage | InputFile | InputVideo):
            return f"{field}[{index}]"
    return None


def requested_format(request: CreateRequest) -> TextFormat:
    """Return the text format of a request; a JSON schema format without a schema is any JSON object."""
    if request.text is None or request.text.format is None:
        return _PLAIN
    if isinstance(request.text.format, JsonSchema) and request.text.format.schema_ is None:
        return JsonObject()
    return request.text.format


_PLAIN = PlainText()
