"""Log probabilities: as the specification has them, where a model has any."""

from __future__ import annotations

import pytest

from .client import output_text, script
from .hosts import ANY

pytestmark = pytest.mark.anyio

SERVED_BY = ANY
INCLUDE = ["message.output_text.logprobs"]
RIVALS = [{"token": "Hi", "logprob": -0.25, "bytes": [72, 105]}, {"token": "Ho", "logprob": -1.5, "bytes": [72, 111]}]
TOKENS = [
    {"token": "Hi", "logprob": -0.25, "bytes": [72, 105], "top": RIVALS},
    {"token": "\ufffd", "logprob": -2.0, "bytes": [240, 159], "top": []},
    {"token": "\ufffd", "logprob": -0.0, "bytes": [152, 128]},
    {"token": "no", "logprob": "-inf", "bytes": []},
]
SHOWN = [
    {**TOKENS[0], "top_logprobs": RIVALS},
    {**TOKENS[1], "top_logprobs": []},
    {**TOKENS[2], "top_logprobs": []},
    {**TOKENS[3], "logprob": -9999.0, "top_logprobs": []},
]
for entry in SHOWN:
    entry.pop("top", None)
MOVES = [
    {"Text": {"text": "Hi", "logprobs": TOKENS[:1]}},
    {"Text": {"text": "\U0001f600", "logprobs": TOKENS[1:3]}},
    {"Text": {"text": "", "logprobs": TOKENS[3:]}},
    "!",
]


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_log_probabilities_have_the_shape_of_the_specification(client, stream, context, model):
    fields = {"include": INCLUDE, "top_logprobs": 2, **context}
    final = await client.made(stream, model=model, input=script(*MOVES), **fields)
    (part,) = final["output"][0]["content"]
    assert (part["text"], part["logprobs"]) == ("Hi\U0001f600!", SHOWN)
    assert final["top_logprobs"] == 2
    assert (await client.get(f"/responses/{final['id']}")).json() == final


async def test_log_probabilities_come_with_the_deltas_of_their_text(client):
    async with client.stream(input=script(*MOVES), include=INCLUDE) as stream:
        await stream.rest()
        deltas = [event for event in stream.events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["logprobs"]) for event in deltas] == [
        ("Hi", SHOWN[:1]),
        ("\U0001f600", SHOWN[1:3]),
        ("", SHOWN[3:]),
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
@pytest.mark.parametrize("model", ["puppet-text", "acme/puppet"])
async def test_a_model_that_has_none_refuses_to_pretend(client, stream, context, model, fields, param):
    (await client.post(model=model, stream=stream, input="hi", **fields, **context)).error(
        400, "unsupported_parameter", param
    )
    final = await client.made(stream, model=model, input=script("hi"), include=[], top_logprobs=0, **context)
    assert output_text(final) == "hi"


async def test_a_text_with_log_probabilities_is_accepted_back(client, stream):
    first = await client.made(stream, input=script(*MOVES), include=INCLUDE)
    ask = {"role": "user", "content": "?"}
    told = await client.told(stream, input=[*first["output"], ask])
    kept = await client.told(stream, input=[ask], previous_response_id=first["id"])
    assert told["items"][0]["content"] == kept["items"][1]["content"] == first["output"][0]["content"]
