"""Checks that the model and the server support a request."""

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
    """Refuse a request that the model or the server does not support.

    Raises:
        InvalidRequest: The request contradicts itself; `param` is the path of the invalid parameter.
        UnsupportedParameter: The request requires an unsupported feature; `param` is the path of its parameter.
    """
    if request.background and not request.store:
        raise InvalidRequest("'background' must not be true when 'store' is false.", param="background")
    for param in ("conversation", "prompt"):
        # Not in this specification, but in the API that it is modelled on. An answer that ignores them would be wrong.
        if getattr(request, param) is not None:
            raise UnsupportedParameter(
                f"The '{param}' parameter is not supported. Send the conversation in 'input'.", param=param
            )
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise UnsupportedParameter(f"'{param}' is not supported.", param=param)
    if not model.structured_output and requested_format(request).type != "text":
        raise UnsupportedParameter("'text.format' must be plain text for this model.", param="text.format")
    if not model.logprobs and wants_logprobs(request):
        param = "top_logprobs" if request.top_logprobs else "include"
        raise UnsupportedParameter("This model does not support log probabilities.", param=param)
    if not model.reasoning and request.reasoning is not None and request.reasoning.effort not in (None, "none"):
        raise UnsupportedParameter("This model does not support 'reasoning.effort'.", param="reasoning.effort")


def wants_logprobs(request: CreateRequest) -> bool:
    """Return whether the request asks for log probabilities."""
    return bool(request.top_logprobs) or "message.output_text.logprobs" in request.include


def check_text_only(earlier: Sequence[Item], input_items: Mapping[int, Item]) -> None:
    """Refuse items that contain images, files or videos.

    Args:
        earlier: Items of earlier responses.
        input_items: The request's own items by their position in `input`.

    Raises:
        UnsupportedParameter: An item contains such a part; `param` is its path.
    """
    for item in earlier:
        if _find_non_text(item):
            raise UnsupportedParameter(_TEXT_ONLY, param="previous_response_id")
    for position, item in input_items.items():
        if path := _find_non_text(item):
            raise UnsupportedParameter(_TEXT_ONLY, param=f"input[{position}].{path}")


_TEXT_ONLY = "This model supports text only."


def _find_non_text(item: Item) -> str | None:
    """Return the path of an item's first part that is not text, such as `content[1]`, or None."""
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
        return _PLAIN_TEXT
    if isinstance(request.text.format, JsonSchema) and request.text.format.schema_ is None:
        return JsonObject()
    return request.text.format


_PLAIN_TEXT = PlainText()
