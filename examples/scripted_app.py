"""An API without a model, to try a client against: `uvicorn examples.scripted_app:app`.

The backend follows simple rules instead of a model, and declares everything a model can have: it remembers a name
it was told, calls a tool where it is asked to, fills in JSON schemas, and otherwise says hello.
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


def rules(turn: Turn) -> Iterator[outputs.Output]:
    """What is said in a turn."""
    answer = ""
    for output in reply(turn):
        answer += output if isinstance(output, str) else getattr(output, "arguments", "")
        yield output
    given = sum(len(str(message["content"]).split()) for message in turn.messages())
    yield outputs.Usage(input_tokens=given, output_tokens=len(answer.split()))


def reply(turn: Turn) -> Iterator[outputs.Output]:
    last = turn.items[-1] if turn.items else None
    tool = choose(turn)
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
        told = re.findall(r"My name is (\w+)", " ".join(str(message["content"]) for message in turn.messages()))
        yield from ("Your name is ", told[-1] if told else "unknown to me", ".")
    elif isinstance(last, FunctionCallOutput):
        yield from ("The tool ", "has answered.")
    else:
        yield from ("Hello, ", "I am ", "here: ", "1, 2, 3, 4, 5.")


def choose(turn: Turn) -> FunctionTool | None:
    """The tool to call, or None."""
    wanted = turn.must_call or re.search(r"weather|tool|shell", turn.text)
    return next(iter(turn.callable_tools), None) if wanted else None


def example(schema: dict[str, Any]) -> Any:
    """A value that a plain schema allows."""
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
app.mount("/v1", ResponsesApp(ResponsesKit(ScriptedBackend(rules, models=[MODEL]))))
