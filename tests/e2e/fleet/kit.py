"""The kit of every fleet process: a paced backend and the store that the environment names."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import anyio

from responses_kit import Backend, ResponsesKit, Timeouts, Turn, outputs
from responses_kit.runners.base import Runner
from responses_kit.stores.opening import open_store

LEASE = 2.0
"""The lease in seconds; short, to limit the waits of the tests."""


class Ticker(Backend):
    """A backend that yields words with pauses, as the last user message asks: `{"words": 5, "pause": 0.1}`."""

    models = ["ticker"]

    async def generate(self, turn: Turn) -> AsyncIterator[outputs.Output]:
        request = json.loads(turn.text)
        for number in range(request["words"]):
            await anyio.sleep(request["pause"])
            yield f"{number} "
        yield outputs.Usage(input_tokens=len(turn.items), output_tokens=request["words"])


def owner(request: Any) -> str:
    return str(request.headers.get("authorization", "")) or "ann"


def new_store() -> Any:
    settings = json.loads(os.environ["FLEET_STORE_SETTINGS"])
    return open_store(os.environ["FLEET_STORE"], **settings)


def new_kit(runner: Runner | None = None) -> ResponsesKit:
    return ResponsesKit(
        Ticker(),
        store=new_store(),
        owner=owner,
        timeouts=Timeouts(lease=LEASE),
        resumable=True,
        runner=runner,
        secrets=["the secret of the whole fleet"],
    )
