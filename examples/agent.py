"""An agent loop with hosted, MCP and client tools: `python -m examples.agent`."""

import json
import sys
from pathlib import Path
from typing import Any

import anyio
from mcp import StdioServerParameters

from responses_kit import HostedTool, ResponsesKit
from responses_kit.backends.local import LocalBackend
from responses_kit.tools.mcp import McpServer


def stock(article: str) -> dict[str, Any]:
    """Return how many pieces of an article are in stock."""
    return {"article": article, "pieces": 12}


def confirm(question: str) -> str:  # a function that the client runs
    return "yes" if question else "What do you mean?"


CLOCK = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("clock_server.py"))])
PARAMETERS = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
CONFIRM = {"type": "function", "name": "confirm", "description": "Asks the customer.", "parameters": PARAMETERS}
STEPS = [  # the small default model does not plan, so each question forces one tool
    ("How many apples are in stock?", {"type": "shop:stock"}),
    ("When do they arrive, if it takes three days?", {"type": "shop:delivery"}),
    ("Ask the customer whether to order them.", {"type": "function", "name": "confirm"}),
]


async def main() -> None:
    stock_tool, mcp_tools = HostedTool.from_function("shop:stock", stock), McpServer("shop:delivery", CLOCK)
    kit = ResponsesKit(LocalBackend(), tools=[stock_tool, mcp_tools])
    tools = [{"type": "shop:stock"}, {"type": "shop:delivery"}, CONFIRM]
    request: dict[str, Any] = {"tools": tools, "max_tool_calls": 1}
    for question, choice in STEPS:
        request |= {"input": [{"role": "user", "content": question}], "tool_choice": choice}
        while request["input"]:  # until no function result is left to send
            results = []
            async with kit.stream(request) as events:
                async for event in events:
                    if event["type"] == "response.output_text.delta":
                        print(event["delta"], end="", flush=True)
                    elif event["type"] == "response.output_item.done" and "arguments" in (item := event["item"]):
                        print(f"\n[{item['type']}: {item['name']}({item['arguments']})]", item.get("output", ""))
                        if item["type"] == "function_call":
                            result = confirm(**json.loads(item["arguments"]))
                            results += [{"type": "function_call_output", "call_id": item["call_id"], "output": result}]
            request |= {"input": results, "tool_choice": "none", "previous_response_id": event["response"]["id"]}
    await kit.aclose()


if __name__ == "__main__":
    anyio.run(main)
