"""An API without a model, for testing clients: `uvicorn examples.scripted_app:app`.

The backend declares every capability and follows fixed rules: it repeats a name from the conversation, calls a tool on
request, fills in JSON schemas, and otherwise says hello.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette

from responses_kit import Model, ResponsesKit, Turn, outputs
from responses_kit.schema.items import FunctionCallOutput
from responses_kit.schema.tools import FunctionTool
from responses_kit.testing import ScriptedBackend
from responses_kit_starlette import ResponsesApp


def script(turn: Turn) -> Iterator[outputs.Output]:
    """Yield the reply to a turn and its usage."""
    answer = ""
    for output in reply(turn):
        answer += output if isinstance(output, str) else getattr(output, "arguments", "")
        yield output
    input_words = sum(len(str(message["content"]).split()) for message in turn.messages())
    yield outputs.Usage(input_tokens=input_words, output_tokens=len(answer.split()))


def reply(turn: Turn) -> Iterator[outputs.Output]:
    last = turn.items[-1] if turn.items else None
    tool = choose_tool(turn)
    if tool is not None and not isinstance(last, FunctionCallOutput):
        arguments = json.dumps(example(tool.parameters or {}))
        yield outputs.ToolCall(tool.name)
        for start in range(0, len(arguments), 8):
            yield outputs.ToolArguments(arguments[start : start + 8])
    elif turn.text_format.type == "json_schema":
        yield json.dumps(example(turn.text_format.schema_ or {}))
    elif turn.text_format.type == "json_object":
        yield '{"ok": true}'
    elif "my name?" in turn.text:
        names = re.findall(r"My name is (\w+)", " ".join(str(message["content"]) for message in turn.messages()))
        yield from ("Your name is ", names[-1] if names else "unknown to me", ".")
    elif isinstance(last, FunctionCallOutput):
        yield from ("The tool ", "has answered.")
    else:
        yield from ("Hello, ", "I am ", "here: ", "1, 2, 3, 4, 5.")


def choose_tool(turn: Turn) -> FunctionTool | None:
    """Return the tool to call, or None."""
    is_requested = turn.must_call or re.search(r"weather|tool|shell", turn.text)
    return next(iter(turn.callable_tools), None) if is_requested else None


def example(schema: dict[str, Any]) -> Any:
    """Return a value that matches a simple JSON schema."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(properties[name]) for name in schema.get("required", properties) if name in properties}
    if kind == "array":
        return [example(schema.get("items", {"type": "string"}))]
    return {"string": "San Francisco", "integer": 1, "number": 1.5, "boolean": True, "null": None}.get(kind)


MODEL = Model(
    "scripted", context_window=131_072, vision=True, tools=True, reasoning=True, structured_output=True, logprobs=True
)

app = Starlette()
app.mount("/v1", ResponsesApp(ResponsesKit(ScriptedBackend(script, models=[MODEL]))))
