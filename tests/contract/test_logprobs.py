"""Log probabilities, for models that support them."""

from __future__ import annotations

import pytest

from .client import output_text, script
from .hosts import FASTEST

pytestmark = pytest.mark.anyio

SERVED_BY = FASTEST
INCLUDE = ["message.output_text.logprobs"]
ALTERNATIVES = [
    {"token": "Hi", "logprob": -0.25, "bytes": [72, 105]},
    {"token": "Ho", "logprob": -1.5, "bytes": [72, 111]},
]
TOKENS = [
    {"token": "Hi", "logprob": -0.25, "bytes": [72, 105], "top": ALTERNATIVES},
    {"token": "\ufffd", "logprob": -2.0, "bytes": [240, 159], "top": []},
    {"token": "\ufffd", "logprob": -0.0, "bytes": [152, 128]},
    {"token": "no", "logprob": "-inf", "bytes": []},
]
EXPECTED = [
    {**TOKENS[0], "top_logprobs": ALTERNATIVES},
    {**TOKENS[1], "top_logprobs": []},
    {**TOKENS[2], "top_logprobs": []},
    {**TOKENS[3], "logprob": -9999.0, "top_logprobs": []},
]
for entry in EXPECTED:
    entry.pop("top", None)
STEPS = [
    {"Text": {"text": "Hi", "logprobs": TOKENS[:1]}},
    {"Text": {"text": "\U0001f600", "logprobs": TOKENS[1:3]}},
    {"Text": {"text": "", "logprobs": TOKENS[3:]}},
    "!",
]


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_logprobs_follow_specification(client, stream, context, model):
    fields = {"include": INCLUDE, "top_logprobs": 2, **context}
    final = await client.complete(stream, model=model, input=script(*STEPS), **fields)
    (part,) = final["output"][0]["content"]
    assert (part["text"], part["logprobs"]) == ("Hi\U0001f600!", EXPECTED)
    assert final["top_logprobs"] == 2
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_logprobs_come_with_their_deltas(client):
    async with client.stream(input=script(*STEPS), include=INCLUDE) as stream:
        await stream.rest()
        deltas = [event for event in stream.events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["logprobs"]) for event in deltas] == [
        ("Hi", EXPECTED[:1]),
        ("\U0001f600", EXPECTED[1:3]),
        ("", EXPECTED[3:]),
        ("!", []),
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include": INCLUDE}, "include"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": INCLUDE, "top_logprobs": 20}, "top_logprobs"),
    ],
)
@pytest.mark.parametrize("model", ["scripted-text", "acme/scripted"])
async def test_logprobs_are_refused_without_capability(client, stream, context, model, fields, param):
    (await client.post(model=model, stream=stream, input="hi", **fields, **context)).error(
        400, "unsupported_parameter", param
    )
    final = await client.complete(stream, model=model, input=script("hi"), include=[], top_logprobs=0, **context)
    assert output_text(final) == "hi"


async def test_text_with_logprobs_is_accepted_back(client, stream):
    first = await client.complete(stream, input=script(*STEPS), include=INCLUDE)
    ask = {"role": "user", "content": "?"}
    turn = await client.describe_turn(stream, input=[*first["output"], ask])
    stored = await client.describe_turn(stream, input=[ask], previous_response_id=first["id"])
    assert turn["items"][0]["content"] == stored["items"][1]["content"] == first["output"][0]["content"]
