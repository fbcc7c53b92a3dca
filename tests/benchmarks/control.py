"""Count how often the default model satisfies tool choice and schemas, and completes its answers.

Run it with `python -m tests.benchmarks.control`, which takes many minutes. A number limits the prompts.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from jsonschema import Draft202012Validator
from pydantic_core import from_json

from responses_kit import ResponsesKit
from responses_kit.backends.local import LocalBackend
from responses_kit.errors import APIError

PROMPTS = """
What is the weather like in Paris today?
Send a mail to Ada that the meeting has moved to noon.
Order two large pizzas with mushrooms to 12 Baker Street.
Turn off the lights in the kitchen.
Remind me to water the plants every Monday at eight.
Describe the film Alien.
Give me a recipe for pancakes.
Who was Marie Curie?
Compute (3 + 4) * 5.
Plan a weekend in Rome for a family of four.
Translate "good morning" into French.
Find cheap flights from Berlin to Lisbon in May.
What should I cook with rice, eggs and spinach?
Book a table for two at an Italian restaurant tonight.
Write a short poem about the sea.
How do I fix a flat tyre on a bicycle?
List three books about the history of science.
Cancel my subscription, please.
I feel tired all the time. What can I do?
Rename the file report.txt to summary.txt and delete the old one.
Compare a laptop with a desktop computer.
What is the capital of Australia, and how many people live there?
My order 4711 has not arrived. Where is it?
Set the temperature in the bedroom to 19.5 degrees.
Explain photosynthesis to a child.
Draw a family tree of a king with three children.
Create a user called Bob with the mail address bob@example.com.
What is 17 % of 250?
Summarise the plot of Hamlet.
Which planet has the most moons?
Make a shopping list for a birthday party.
Classify this review: "The food was cold and the waiter was rude."
Extract the names from: "Anna met Ben and Carla in Oslo."
Play some jazz in the living room, not too loud.
Convert 100 US dollars to euros.
Write a job advert for a gardener.
What happened on 20 July 1969?
Schedule a call with Dr. Smith on 3 March 2026 at 15:00 for 30 minutes.
How tall is Mount Everest in feet?
Suggest five names for a black cat.
Report a bug: the app crashes when I press save.
Is 97 a prime number?
Give me the menu of a small café.
Search for jobs as a nurse in Madrid.
Pay 25 euros to Carla for the concert tickets.
Tell me a joke about programmers.
What are the symptoms of the flu?
Estimate the calories of a cheeseburger with fries.
Organise these words by topic: apple, hammer, pear, saw.
😀 Ça va? 你好!
""".strip().splitlines()


def function(name: str, description: str, parameters: Any, **more: Any) -> dict[str, Any]:
    """Return a function tool."""
    return {"type": "function", "name": name, "description": description, "parameters": parameters, **more}


def record(_optional: str = "", **properties: Any) -> dict[str, Any]:
    """Return an object schema in which all members are required except the ones listed first."""
    required = [name for name in properties if name not in _optional.split()]
    return {"type": "object", "properties": properties, "required": required}


TEXT, NUMBER, WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def many(items: Any, **more: Any) -> dict[str, Any]:
    """Return an array schema."""
    return {"type": "array", "items": items, **more}


def one_of(*values: Any) -> dict[str, Any]:
    """Return an enum schema."""
    return {"enum": list(values)}


ADDRESS = record("zip", street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
TREE = {
    "$defs": {"node": record(name=TEXT, children=many({"$ref": "#/$defs/node"}))},
    **record(root={"$ref": "#/$defs/node"}),
}
LINKED = {
    "$defs": {"step": record(do=TEXT, then={"anyOf": [{"$ref": "#/$defs/step"}, {"type": "null"}]})},
    **record(first={"$ref": "#/$defs/step"}),
}

TOOLS: list[list[dict[str, Any]]] = [
    [
        function("get_weather", "Current weather", record("unit", city=TEXT, unit=one_of("celsius", "fahrenheit"))),
        function(
            "send_mail",
            "Sends a mail",
            record("cc", to={"type": "string", "format": "email"}, subject=TEXT, body=TEXT, cc=many(TEXT)),
        ),
        function("now", "The time", record()),
    ],
    [
        function(
            "order",
            "Orders goods",
            record(
                "note",
                items=many(record(name=TEXT, quantity={"type": "integer", "minimum": 1, "maximum": 99}, price=NUMBER)),
                address=ADDRESS,
                note=TEXT,
            ),
            strict=False,
        ),
        function("track-order", "Where an order is", record(order_id={"type": "string", "minLength": 4})),
        function(
            "pay",
            "Pays",
            {**record(amount={"type": "number", "exclusiveMinimum": 0}, to=TEXT, currency=one_of("EUR", "USD"))},
        ),
    ],
    [
        function(
            "edit_file",
            "Edits a file",
            record(
                path={"type": "string", "pattern": "^[a-z./_]+$"},
                edits=many(
                    {
                        "anyOf": [
                            record(kind={"const": "insert"}, line=WHOLE, text=TEXT),
                            record(kind={"const": "delete"}, lines=many(WHOLE, minItems=2, maxItems=2)),
                        ]
                    },
                    minItems=1,
                ),
            ),
        ),
        function("make_tree", "Makes a tree", TREE),
        function("plan", "Plans steps, one after the other", LINKED),
    ],
    [
        function(
            "schedule",
            "Adds to the calendar",
            record(
                "attendees",
                title=TEXT,
                start={"type": "string", "format": "date-time"},
                minutes={"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 480},
                attendees=many(record("mail", name=TEXT, mail={"type": "string", "format": "email"})),
            ),
        ),
        function("search", "Searches the web", record("site limit", query=TEXT, site=TEXT, limit=WHOLE)),
        function("anything", "Does anything", None),
    ],
    [
        function(
            "set_devices",
            "Controls devices",
            record(
                room=one_of("kitchen", "bedroom", "living room", None),
                settings={"type": "object", "additionalProperties": {"type": ["number", "boolean"]}},
            ),
        ),
        function("tell", "Tells the user something", record("tone", text=TEXT, tone=one_of("kind", "neutral"))),
        function("calculate", "Computes", record(expression={"type": "string", "maxLength": 40}, digits=WHOLE)),
    ],
]

FORMATS: list[dict[str, Any]] = [
    record(
        title=TEXT,
        year=WHOLE,
        genres=many(TEXT),
        people=many(record(name=TEXT, role=one_of("actor", "director", "writer"), score=NUMBER)),
    ),
    record(
        "tips",
        name=TEXT,
        servings={"type": "integer", "minimum": 1, "maximum": 12},
        ingredients=many(record("unit", item=TEXT, amount=NUMBER, unit=one_of("g", "ml", "piece"))),
        steps=many(TEXT, minItems=1, maxItems=6),
        tips=TEXT,
    ),
    {
        "$defs": {"address": ADDRESS, "mood": one_of("good", "bad", "mixed")},
        **record(
            summary=TEXT,
            mood={"$ref": "#/$defs/mood"},
            place={"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
            confidence={"type": "number", "minimum": 0, "maximum": 1},
        ),
    },
    TREE,
    {
        **record(answer=TEXT, sources=many(record(title=TEXT, url=TEXT)), certain={"type": "boolean"}),
        "additionalProperties": False,
    },
]


class Tally:
    """Counts of right answers and of faults, by kind."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()
        self.all: Counter[str] = Counter()
        self.tokens = 0
        self.calls: Counter[int] = Counter()

    def count(self, kind: str, prompt: str, fault: str | None) -> None:
        """Count one answer."""
        self.all[kind] += 1
        self.right[kind] += fault is None
        if fault is not None:
            print(f"  {kind}: {fault} ({prompt})", flush=True)


def fault_of(value: str, schema: Any) -> str | None:
    """Return the fault of a JSON text, if any."""
    try:
        error = next(Draft202012Validator(schema or {"type": "object"}).iter_errors(from_json(value)), None)
    except ValueError as problem:
        return f"no JSON: {problem}"
    return None if error is None else f"{error.validator}: {error.message[:80]}"


def calls_fault(body: Mapping[str, Any], tools: list[dict[str, Any]], names: set[str]) -> str | None:
    """Return the fault of an answer that must consist of tool calls, if any."""
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    for item in body["output"]:
        if item["type"] != "function_call" or item["name"] not in names:
            return f"{item['type']} {item.get('name', '')} is not an expected call"
        if fault := fault_of(item["arguments"], schemas[item["name"]]):
            return f"{item['name']}: {fault}"
    return None if body["output"] else "nothing came"


async def ask(
    kit: ResponsesKit, tally: Tally, request: dict[str, Any], judge: Callable[[Any], str | None], kind: str
) -> None:
    """Send a request, and check and count its answer."""
    try:
        body: Any = await kit.create(request)
    except APIError as error:
        tally.count(kind, request["input"], f"refused: {error.message}")
        return
    body = body if isinstance(body, dict) else body.model_dump()
    tally.tokens += body["usage"]["output_tokens"]
    tally.calls[sum(item["type"] == "function_call" for item in body["output"])] += 1
    if body["status"] != "completed" and kind != "none":  # free text may be truncated
        why = (body["incomplete_details"] or body["error"] or {}).values()
        tally.count(kind, request["input"], f"{body['status']} {' '.join(map(str, why))}")
    else:
        tally.count(kind, request["input"], judge(body))


async def run(prompts: int) -> None:
    """Send all requests and print the result."""
    backend = LocalBackend(threads=1)
    kit = ResponsesKit(backend)
    tally = Tally()
    started = time.perf_counter()
    for number in sorted(
        range(prompts), key=lambda number: number % len(TOOLS)
    ):  # group requests with equal tools to reuse the prefix
        prompt, tools, schema = PROMPTS[number], TOOLS[number % len(TOOLS)], FORMATS[number % len(FORMATS)]
        names = [tool["name"] for tool in tools]
        named, few = names[number // len(TOOLS) % len(names)], names[1:]
        base = {"input": prompt, "tools": tools}

        def only(*allowed: str, tools: list[dict[str, Any]] = tools) -> Callable[[Any], str | None]:
            return lambda body: calls_fault(body, tools, set(allowed))

        any_of_them = only(*names)

        def single(body: Any, check: Callable[[Any], str | None] = any_of_them) -> str | None:
            return "more than one call" if len(body["output"]) > 1 else check(body)

        def silent(body: Any) -> str | None:
            return None if all(item["type"] == "message" for item in body["output"]) else "a call"

        def formatted(body: Any, schema: Any = schema) -> str | None:
            return fault_of(body["output"][0]["content"][0]["text"], schema)

        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": n} for n in few]}
        form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
        await ask(kit, tally, {**base, "tool_choice": "required"}, only(*names), "required")
        await ask(kit, tally, {**base, "tool_choice": {"type": "function", "name": named}}, only(named), "named")
        await ask(kit, tally, {**base, "tool_choice": allowed}, only(*few), "allowed_tools")
        await ask(kit, tally, {**base, "tool_choice": "required", "parallel_tool_calls": False}, single, "not parallel")
        await ask(kit, tally, {**base, "tool_choice": "none", "max_output_tokens": 100}, silent, "none")
        await ask(kit, tally, {"input": prompt, "text": {"format": form}}, formatted, "json_schema")
        done = time.perf_counter() - started
        print(f"{sum(tally.all.values())} answers, {tally.tokens} tokens, {done:.0f} s", flush=True)
    await kit.aclose()
    print(", ".join(f"{kind} {tally.right[kind]}/{tally.all[kind]}" for kind in tally.all))
    print("calls in an answer:", dict(sorted(tally.calls.items())))


def main() -> None:
    """Run with the number of prompts from the command line, or with all."""
    anyio.run(run, int(sys.argv[1]) if sys.argv[1:] else len(PROMPTS))


if __name__ == "__main__":
    main()
