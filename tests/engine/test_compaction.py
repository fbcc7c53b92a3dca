"""Compaction: the messages that stay, the prompts, and the use of the summary."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import anyio
import openresponses_types.types as official
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from responses_kit import Backend, Model, ResponsesKit, Turn, errors, outputs
from responses_kit.engine.compaction import compact
from responses_kit.outputs import Usage
from responses_kit.protocol.encryption import Encryptor
from responses_kit.protocol.validation import parse_compact_request, parse_request
from responses_kit.schema.base import MAX_TEXT
from responses_kit.schema.response import CompactedResponse
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_item, check_response

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

SECRET, OLDER = "the secret of these tests", "the secret of older tests"
IMAGE = {"type": "input_image", "image_url": "https://example.org/cat.png"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "sea"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "blue"}


def user(text: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def system(text: str, role: str = "system") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


CONVERSATION = [
    user("We launch on Tuesday."),
    assistant("Noted."),
    user("And the weather?"),
    assistant("It will rain."),
]


def count_words(turn: Turn) -> int:
    """Count each word as one token."""
    texts = [turn.instructions or "", *(str(message["content"]) for message in turn.messages())]
    return sum(len(text.split()) for text in texts)


class FakeBackend(Backend):
    """Summarizes with `write`, counts tokens with `count`, and may return `compact_result` as its own summary."""

    def __init__(
        self,
        write: Callable[[Turn], str | Exception] = lambda turn: "A summary.",
        *,
        compact_result: Callable[[Turn], Any] = lambda turn: None,
        count: Callable[[Turn], int | None] = count_words,
        usage: Usage | None = None,
        **abilities: Any,
    ) -> None:
        self.models = [Model("writer", **abilities), "plain"]
        self.prompted_turns: list[Turn] = []
        self.counted: list[Turn] = []
        self._write, self._own, self._count, self._usage = write, compact_result, count, usage

    async def collect(self, turn: Turn) -> tuple[str, Usage | None]:
        """Complete a turn as the kit would."""
        self.prompted_turns.append(turn)
        text = self._write(turn)
        if isinstance(text, Exception):
            raise text
        return text, self._usage

    async def count_tokens(self, turn: Turn) -> int | None:
        self.counted.append(turn)
        return self._count(turn)

    async def compact(self, turn: Turn) -> str | None:
        compacted = self._own(turn)
        if isinstance(compacted, Exception):
            raise compacted
        return compacted


class Compactor:
    """Compacts with one backend, one store and one secret."""

    def __init__(self, backend: FakeBackend | None = None) -> None:
        self.backend = FakeBackend() if backend is None else backend
        self.store = MemoryStore()
        self.encryptor = Encryptor([SECRET, OLDER])
        self.kit = ResponsesKit(
            ScriptedBackend(["Yes."], models=self.backend.models), store=self.store, secrets=[SECRET]
        )

    async def compact(self, input_: Any = CONVERSATION, *, owner: str = "ann", **body: Any) -> dict[str, Any]:
        request = parse_compact_request({"model": "writer", "input": input_, **body})
        models = {one.name: one for one in map(_model, self.backend.models)}
        compacted = await compact(
            request,
            owner=owner,
            models=models,
            store=self.store,
            encryptor=self.encryptor,
            backend=self.backend,
            complete_turn=self.backend.collect,
            now=1_700_000_000.5,
        )
        check_compacted(compacted)
        return compacted

    async def compact_refused(self, input_: Any = CONVERSATION, **body: Any) -> errors.APIError:
        with pytest.raises(errors.APIError) as caught:
            await self.compact(input_, **body)
        assert len(caught.value.message) < 300
        return caught.value

    def decrypt_summary(self, compacted: Mapping[str, Any], owner: str = "ann") -> str:
        return decrypt_summary(compacted, self.encryptor, owner)

    @property
    def prompts(self) -> list[str]:
        """The pieces of the conversation in the prompts."""
        return [turn.text for turn in self.backend.prompted_turns]


def _model(model: str | Model) -> Model:
    return Model(model) if isinstance(model, str) else model


def check_compacted(compacted: Mapping[str, Any]) -> None:
    """Check that a result follows the specification and can be sent back as input."""
    official.CompactResource.model_validate_json(json.dumps(compacted, allow_nan=False), strict=True)
    CompactedResponse.model_validate(dict(compacted))
    assert compacted.keys() == {"id", "object", "created_at", "output", "usage"}
    for item in compacted["output"]:
        check_item(item)
    assert len({item["id"] for item in compacted["output"]}) == len(compacted["output"])
    kinds = [item["type"] for item in compacted["output"]]
    position = kinds.index("compaction")
    assert kinds.count("compaction") == 1
    assert set(kinds[:position]) <= {"message"}
    assert set(kinds[position + 1 :]) <= {"function_call"}
    usage = compacted["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    repeated = parse_request({"input": compacted["output"]}).input
    assert not isinstance(repeated, str)
    assert repeated is not None
    assert [item.model_dump(mode="json") for item in repeated] == compacted["output"], (
        "the output is not accepted unchanged as input"
    )


def decrypt_summary(compacted: Mapping[str, Any], encryptor: Encryptor, owner: str) -> str:
    """Return the decrypted summary of a compaction."""
    (payload,) = (item["encrypted_content"] for item in compacted["output"] if item["type"] == "compaction")
    decrypted = encryptor.decrypt(payload, kind="compaction", owner=owner, param="")
    assert decrypted is not None
    summary: str = json.loads(decrypted)["summary"]
    return summary


def output_texts(compacted: Mapping[str, Any]) -> list[str]:
    """Return the texts of messages and the types of other items."""
    return [item["content"][0]["text"] if item["type"] == "message" else item["type"] for item in compacted["output"]]


# Output.


async def test_conversation_becomes_user_messages_and_encrypted_summary() -> None:
    compactor = Compactor(FakeBackend(usage=Usage(30, 4, 20, 1)))
    compacted = await compactor.compact()
    assert output_texts(compacted) == ["We launch on Tuesday.", "And the weather?", "compaction"]
    assert (compacted["object"], compacted["created_at"], compacted["id"][:5]) == (
        "response.compaction",
        1_700_000_000,
        "resp_",
    )
    assert compactor.decrypt_summary(compacted) == "A summary."
    assert "summary" not in json.dumps(compacted["output"])
    assert compacted["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 20},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 34,
    }


async def test_text_input_is_one_user_message() -> None:
    compacted = await Compactor().compact("We launch on Tuesday.")
    assert output_texts(compacted) == ["We launch on Tuesday.", "compaction"]


async def test_compaction_stores_nothing() -> None:
    compactor = Compactor()
    compacted = await compactor.compact()
    assert await compactor.store.get("ann", compacted["id"]) is None
    assert not await compactor.store.items("ann", [item["id"] for item in compacted["output"]])


async def test_system_and_developer_messages_stay_unchanged() -> None:
    compactor = Compactor(FakeBackend(context_window=400))
    function_output = system("law " * 200, "developer")
    compacted = await compactor.compact([system("Be brief."), *CONVERSATION, function_output, user("Go on.")])
    assert output_texts(compacted) == [
        "Be brief.",
        "We launch on Tuesday.",
        "And the weather?",
        "law " * 200,
        "Go on.",
        "compaction",
    ]
    assert [item["role"] for item in compacted["output"][:-1]] == ["system", "user", "user", "developer", "user"]
    assert not any("law" in prompt or "brief" in prompt for prompt in compactor.prompts)


async def test_latest_user_messages_stay_within_their_share_of_window() -> None:
    compactor = Compactor(FakeBackend(context_window=800))  # user messages may take an eighth of it, 100 words
    conversation = [message for n in range(20) for message in (user(f"{n} " * 30), assistant("Yes."))]
    compacted = await compactor.compact(conversation)
    assert output_texts(compacted) == [*(f"{n} " * 30 for n in (17, 18, 19)), "compaction"]


async def test_last_user_message_stays_up_to_half_the_window() -> None:
    compactor = Compactor(FakeBackend(context_window=800))
    assert output_texts(await compactor.compact([*CONVERSATION, user("a " * 400)])) == ["a " * 400, "compaction"]
    assert output_texts(await compactor.compact([*CONVERSATION, user("a " * 401)])) == ["compaction"]


async def test_images_and_files_become_placeholders_in_the_prompt() -> None:
    compactor = Compactor(FakeBackend(vision=True))
    look = user([{"type": "input_text", "text": "Look:"}, IMAGE, {"type": "input_file", "file_data": "QQ=="}])
    compacted = await compactor.compact([look])
    assert [part["type"] for part in compacted["output"][0]["content"]] == ["input_text", "input_image", "input_file"]
    assert compactor.prompts == ["The user: Look: [a picture] [a file]"]
    turns = CALL, OUTPUT | {"output": [IMAGE, {"type": "input_video", "video_url": "https://example.org/a.mp4"}]}
    await compactor.compact([user("Look."), *turns])
    assert compactor.prompts[-1].endswith("look returned: [a picture] [a video]")


async def test_calls_without_outputs_follow_the_summary() -> None:
    compactor = Compactor()
    second = CALL | {"call_id": "c2", "arguments": "{"}
    compacted = await compactor.compact([user("Look."), CALL, OUTPUT, second, CALL | {"call_id": "c3"}])
    assert output_texts(compacted) == ["Look.", "compaction", "function_call", "function_call"]
    assert [item.get("call_id") for item in compacted["output"][2:]] == ["c2", "c3"]
    assert compacted["output"][2]["arguments"] == "{"
    results = [OUTPUT | {"call_id": "c3"}, OUTPUT | {"call_id": "c2"}]
    check_response(await compactor.kit.create({"input": [*compacted["output"], *results]}, owner="ann"))


async def test_repeated_call_id_stays_open_without_its_own_output() -> None:
    compacted = await Compactor().compact([user("Look."), CALL, OUTPUT, CALL | {"arguments": "repeated"}])
    assert [item["arguments"] for item in compacted["output"] if item["type"] == "function_call"] == ["repeated"]


# Prompts.


async def test_prompt_holds_transcript_in_order() -> None:
    compactor = Compactor(FakeBackend(tools=True))
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    receipt = {"type": "acme:find", "call_id": "c9", "name": "find", "arguments": "{}", "output": "found"}
    function_output = {"type": "function_call_output", "name": "goal", "output": "Win."}
    await compactor.compact(
        [*CONVERSATION[:2], thought, CALL, OUTPUT, receipt, function_output, {"type": "acme:chart"}]
    )
    assert compactor.prompts == [
        "The user: We launch on Tuesday.\n"
        "The assistant: Noted.\n"
        'The assistant called look({"at": "sea"})\n'
        "look returned: blue\n"
        "The assistant called find({})\n"
        "find returned: found\n"
        "The assistant called goal({})\n"
        "goal returned: Win."
    ]


async def test_prompt_requests_plain_text_without_tools_and_reasoning() -> None:
    compactor = Compactor(FakeBackend(context_window=8000, reasoning=True, temperature=0.3, top_p=0.5))
    compacted = await compactor.compact([*CONVERSATION, assistant("word " * 6000)])
    (turn,) = compactor.backend.prompted_turns
    assert (turn.tools, turn.tool_choice, turn.text_format.type) == ((), "none", "text")
    assert turn.max_output_tokens == 1000
    assert turn.reasoning is not None
    assert turn.reasoning.effort == "none"
    assert (turn.temperature, turn.top_p, turn.owner, turn.response_id) == (0.3, 0.5, "ann", compacted["id"])
    plain = Compactor()
    await plain.compact(model="plain")
    assert plain.backend.prompted_turns[0].reasoning is None
    assert plain.backend.prompted_turns[0].model == "plain"


@pytest.mark.parametrize(("window", "length", "max_tokens"), [(8000, 1, 64), (8000, 1600, 500), (None, 40_000, 4096)])
async def test_summary_length_depends_on_window_and_conversation(
    window: int | None, length: int, max_tokens: int
) -> None:
    compactor = Compactor(FakeBackend(context_window=window))
    await compactor.compact([assistant("word " * length)])
    allowed = compactor.backend.prompted_turns[0].max_output_tokens
    assert allowed is not None
    assert max_tokens <= allowed < max_tokens + 4


async def test_instructions_of_request_guide_the_summary() -> None:
    compactor = Compactor()
    first = await compactor.kit.create({"input": "Hi", "instructions": "Be a pirate."}, owner="ann")
    await compactor.compact("Go on.", previous_response_id=first["id"], instructions="Mind the dates.")
    await compactor.compact("Go on.", previous_response_id=first["id"])
    with_instructions, plain = compactor.backend.prompted_turns
    assert with_instructions.instructions is not None
    assert with_instructions.instructions.endswith("Mind the dates.")
    assert "pirate" not in str(with_instructions.instructions) + str(plain.instructions)
    assert with_instructions.instructions.startswith(str(plain.instructions))


async def test_long_conversation_is_summarized_in_pieces() -> None:
    compactor = Compactor(
        FakeBackend(lambda turn: f"Up to here {len(compactor.prompts)}.", context_window=400, usage=Usage(10, 2))
    )
    conversation = [message for n in range(40) for message in (user(f"Question {n}?"), assistant(f"Answer {n}. " * 9))]
    compacted = await compactor.compact(conversation)
    assert len(compactor.prompts) > 2
    assert all(count_words(turn) <= 350 for turn in compactor.backend.prompted_turns)
    assert [turn.round for turn in compactor.backend.prompted_turns] == [*range(len(compactor.prompts))]
    assert compactor.decrypt_summary(compacted) == f"Up to here {len(compactor.prompts)}."
    pieces = [compactor.prompts[0]]
    for number, prompt in enumerate(compactor.prompts[1:], 1):
        before, _, piece = prompt.partition("\n\nWhat was said since then:\n")
        assert before == f"Summary so far:\nUp to here {number}."
        pieces.append(piece)
    assert all(piece.endswith("\n") for piece in pieces[:-1]), "a piece does not end with a line"
    texts = [f"The user: Question {n}?\nThe assistant: {f'Answer {n}. ' * 9}" for n in range(40)]
    assert "".join(pieces) == "\n".join(texts)
    assert compacted["usage"]["total_tokens"] == 12 * len(pieces)


@pytest.mark.parametrize("text", ["word " * 2000, "x" * 4000, "\U0001f600" * 1000])
async def test_long_message_is_summarized_in_pieces(text: str) -> None:
    def letters(turn: Turn) -> int:
        return len((turn.instructions or "") + turn.text)

    compactor = Compactor(FakeBackend(count=letters, context_window=1000))
    await compactor.compact(text)
    pieces = [prompt.rpartition("since then:\n")[2] for prompt in compactor.prompts]
    assert len(pieces) > 1
    assert "".join(pieces) == f"The user: {text}"
    assert all(letters(turn) <= 875 for turn in compactor.backend.prompted_turns)


async def test_token_estimate_is_lowered_when_backend_refuses_prompt() -> None:
    def write(turn: Turn) -> str | Exception:
        return errors.ContextLengthExceeded("Too long.") if len(turn.text) > 3000 else "Short."

    compactor = Compactor(FakeBackend(write, count=lambda turn: None, context_window=2048))
    compacted = await compactor.compact([user("a word " * 900), assistant("another " * 900)])
    lengths = [len(prompt) for prompt in compactor.prompts]
    assert max(lengths) < 4 * 2048
    assert min(lengths) > 0
    assert compactor.decrypt_summary(compacted) == "Short."
    assert compacted["usage"]["total_tokens"] == 0


async def test_prompt_is_shortened_when_counting_exceeds_context() -> None:
    def count(turn: Turn) -> int:
        if count_words(turn) > 300:
            raise errors.ContextLengthExceeded("Too long.")
        return count_words(turn)

    compactor = Compactor(FakeBackend(count=count, context_window=300))
    compacted = await compactor.compact([user("a b c d e f " * 200), assistant("another " * 400), user("Go on.")])
    assert output_texts(compacted) == ["Go on.", "compaction"]
    assert len(compactor.prompts) > 4


async def test_large_window_reads_conversation_in_one_pass() -> None:
    compactor = Compactor(FakeBackend(context_window=4_000_000))
    long = assistant("x" * (MAX_TEXT - 1))
    await compactor.compact([long, long])
    assert len(compactor.prompts) == 1


async def test_images_are_estimated_when_backend_does_not_count() -> None:
    compactor = Compactor(FakeBackend(count=lambda turn: None, context_window=16_000, vision=True))
    compacted = await compactor.compact([user([IMAGE, {"type": "input_text", "text": f"{n}"}]) for n in range(9)])
    assert [item["content"][1]["text"] for item in compacted["output"][:-1]] == ["7", "8"]


async def test_unknown_window_uses_default() -> None:
    compactor = Compactor(FakeBackend(count=lambda turn: None))
    await compactor.compact([assistant("word " * 20_000)])
    assert len(compactor.prompts) == 1
    assert compactor.backend.prompted_turns[0].max_output_tokens == 4096


# Repeated compaction.


async def test_compacted_conversation_can_be_compacted_again() -> None:
    compactor = Compactor(FakeBackend(lambda turn: f"Summary {len(compactor.prompts)}."))
    first = await compactor.compact()
    second = await compactor.compact([*first["output"], user("Where?"), assistant("Here.")])
    assert output_texts(second) == ["We launch on Tuesday.", "And the weather?", "Where?", "compaction"]
    assert compactor.prompts[1].endswith(
        "The assistant: Summary of the conversation so far:\nSummary 1.\nThe user: Where?\nThe assistant: Here."
    )
    assert compactor.decrypt_summary(second) == "Summary 2."


async def test_stored_conversation_is_compacted_for_its_owner_only() -> None:
    compactor = Compactor()
    first = await compactor.kit.create({"input": "One?"}, owner="ann")
    second = await compactor.kit.create({"input": "Two?", "previous_response_id": first["id"]}, owner="ann")
    compacted = await compactor.compact(None, previous_response_id=second["id"])
    assert output_texts(compacted) == ["One?", "Two?", "compaction"]
    assert compactor.prompts == ["The user: One?\nThe assistant: Yes.\nThe user: Two?\nThe assistant: Yes."]
    other_owner = await compactor.compact_refused("Three?", previous_response_id=second["id"], owner="bob")
    unknown = await compactor.compact_refused("Three?", previous_response_id="resp_unknown", owner="bob")
    assert other_owner.payload() == unknown.payload()
    assert other_owner.code == "previous_response_not_found"


async def test_summary_is_decrypted_for_its_owner_only_and_after_secret_rotation() -> None:
    compactor = Compactor()
    compactor.encryptor = Encryptor([OLDER])
    compacted = await compactor.compact()
    compactor.encryptor = Encryptor([SECRET, OLDER])
    assert output_texts(await compactor.compact([*compacted["output"], user("Go on.")]))[-2:] == [
        "Go on.",
        "compaction",
    ]
    error = await compactor.compact_refused([user("Go on."), *compacted["output"]], owner="bob")
    assert (error.code, error.param) == ("invalid_encrypted_content", "input[3].encrypted_content")


async def test_next_response_sees_summary() -> None:
    compactor = Compactor()
    compacted = await compactor.compact()
    response = await compactor.kit.create({"input": [*compacted["output"], user("When?")]}, owner="ann")
    check_response(response)
    backend = compactor.kit.backend
    assert isinstance(backend, ScriptedBackend)
    assert backend.turns[-1].messages() == [
        {"role": "user", "content": "We launch on Tuesday."},
        {"role": "user", "content": "And the weather?"},
        {"role": "assistant", "content": "Summary of the conversation so far:\nA summary."},
        {"role": "user", "content": "When?"},
    ]


# Backends with their own compaction.


async def test_backend_compact_result_is_used() -> None:
    turns: list[Turn] = []
    compactor = Compactor(FakeBackend(compact_result=lambda turn: turns.append(turn) or "Its own words."))
    compacted = await compactor.compact([system("Be brief."), *CONVERSATION], instructions="Mind the dates.")
    assert compactor.decrypt_summary(compacted) == "Its own words."
    assert compactor.backend.prompted_turns == []
    (turn,) = turns
    assert [item.type for item in turn.items] == ["message"] * 5
    assert turn.instructions == "Mind the dates."
    assert (compacted["usage"]["input_tokens"], compacted["usage"]["output_tokens"]) == (count_words(turn), 3)


async def test_usage_is_zero_when_backend_does_not_count() -> None:
    compactor = Compactor(FakeBackend(compact_result=lambda turn: "Its own words.", count=lambda turn: None))
    assert (await compactor.compact())["usage"]["total_tokens"] == 0


async def test_usage_is_counted_when_model_reports_none() -> None:
    compactor = Compactor()
    compacted = await compactor.compact()
    (turn,) = compactor.backend.prompted_turns
    assert (compacted["usage"]["input_tokens"], compacted["usage"]["output_tokens"]) == (count_words(turn), 2)


@pytest.mark.parametrize("result", [LookupError("secret-host is gone"), 1, "", " \n", b"bytes"])
async def test_failing_backend_is_model_error_with_details_in_log_only(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "responses_kit")
    error = await Compactor(FakeBackend(compact_result=lambda turn: result)).compact_refused()
    assert (error.status, error.code) == (500, "model_error")
    assert "secret-host" not in error.message
    assert caplog.records


async def test_failing_token_count_is_model_error() -> None:
    def count(turn: Turn) -> int:
        raise LookupError("secret-host is gone")

    error = await Compactor(FakeBackend(count=count)).compact_refused()
    assert error.code == "model_error"


async def test_api_error_of_backend_reaches_client() -> None:
    refusal = errors.TooManyRequests("The queue is refusal.")
    assert await Compactor(FakeBackend(lambda turn: refusal)).compact_refused() is refusal
    assert await Compactor(FakeBackend(compact_result=lambda turn: refusal)).compact_refused() is refusal


# Refusals.


@pytest.mark.parametrize(
    "input_",
    [
        None,
        [],
        [system("Be brief.")],
        [{"type": "reasoning", "summary": []}],
        [{"type": "acme:chart"}],
    ],
)
async def test_input_without_conversation_is_refused(input_: Any) -> None:
    compactor = Compactor()
    error = await compactor.compact_refused(input_, instructions="Sum up.")
    assert (error.status, error.param) == (400, "input")
    assert compactor.backend.prompted_turns == []


async def test_unknown_model_is_refused() -> None:
    assert (await Compactor().compact_refused(model="other")).code == "model_not_found"


async def test_unsupported_content_is_refused() -> None:
    error = await Compactor().compact_refused([user("Look."), user([IMAGE])])
    assert (error.code, error.param) == ("unsupported_parameter", "input[1].content[0]")


async def test_output_without_call_is_refused() -> None:
    assert (await Compactor().compact_refused([user("Look."), OUTPUT])).param == "input[1].call_id"


@pytest.mark.parametrize("text", ["", " ", "\n\n"])
async def test_empty_summary_is_model_error(text: str) -> None:
    error = await Compactor(FakeBackend(lambda turn: text)).compact_refused()
    assert (error.status, error.code) == (500, "model_error")


@pytest.mark.parametrize("counts", [True, False])
async def test_overlong_conversation_is_refused_without_prompt(counts: bool) -> None:
    compactor = Compactor(FakeBackend(count=count_words if counts else lambda turn: None, context_window=200))
    error = await compactor.compact_refused([assistant("a word and " * 10_000)])
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "input")
    assert compactor.backend.prompted_turns == []


async def test_overlong_instructions_are_refused() -> None:
    compactor = Compactor(FakeBackend(context_window=200))
    error = await compactor.compact_refused(instructions="law " * 200)
    assert (error.code, error.param) == ("context_length_exceeded", "instructions")
    assert compactor.backend.prompted_turns == []


async def test_overlong_summary_is_model_error() -> None:
    compactor = Compactor(FakeBackend(lambda turn: "on and on " * 1000, context_window=400))
    error = await compactor.compact_refused([assistant("word " * 1000)])
    assert error.code == "model_error"


async def test_backend_that_refuses_every_length_is_asked_few_times() -> None:
    refusal = errors.ContextLengthExceeded("Too long.")
    compactor = Compactor(FakeBackend(lambda turn: refusal, count=lambda turn: None))
    assert await compactor.compact_refused() is refusal
    assert len(compactor.prompts) < 10
    counting_compactor = Compactor(FakeBackend(lambda turn: refusal))
    assert await counting_compactor.compact_refused() is refusal
    assert len(counting_compactor.prompts) == 1


async def test_summary_too_long_to_send_back_is_model_error() -> None:
    for length, fits in ((MAX_TEXT // 4 * 3 - 200, True), (MAX_TEXT // 4 * 3, False), (2 * MAX_TEXT, False)):
        compactor = Compactor(
            FakeBackend(compact_result=lambda turn, length=length: "x" * length, count=lambda turn: None)
        )
        if fits:
            compacted = await compactor.compact()
            assert len(compactor.decrypt_summary(compacted)) == length
        else:
            assert (await compactor.compact_refused()).code == "model_error"


async def test_message_selection_counts_tokens_few_times() -> None:
    compactor = Compactor(FakeBackend(context_window=4000))
    await compactor.compact([message for n in range(2000) for message in (user(f"{n}"), assistant("Yes, that is so."))])
    assert len(compactor.backend.counted) < 20 + 6 * len(compactor.prompts)


# Through the kit.


def _truncated_in_thread(turn: Turn) -> Iterator[outputs.Output]:
    yield outputs.Reasoning("Hm.")
    yield "From a "
    yield outputs.Text("thread.")
    yield Usage(1, 2)
    yield outputs.Finish("max_output_tokens")


async def _refusing(turn: Turn) -> AsyncIterator[outputs.Output]:
    yield outputs.Refusal("No.")


async def _failing(turn: Turn) -> AsyncIterator[outputs.Output]:
    yield "half "
    raise LookupError("secret-host is gone")


class CallableBackend(Backend):
    """Generates with a function."""

    def __init__(self, generate: Callable[[Turn], Any]) -> None:
        self.models = ["writer"]
        self.generate = generate  # type: ignore[method-assign]


async def test_truncated_answer_is_used_as_summary() -> None:
    compacted = await ResponsesKit(CallableBackend(_truncated_in_thread), secrets=[SECRET]).compact(
        {"model": "writer", "input": "Hi"}
    )
    assert decrypt_summary(compacted, Encryptor([SECRET]), "") == "From a thread."
    assert compacted["usage"]["total_tokens"] == 3


@pytest.mark.parametrize("generate", [_refusing, _failing, lambda turn: []])
async def test_missing_summary_is_model_error(generate: Callable[[Turn], Any]) -> None:
    with pytest.raises(errors.ModelError) as caught:
        await ResponsesKit(CallableBackend(generate)).compact({"model": "writer", "input": "Hi"})
    assert "secret-host" not in caught.value.message


async def test_cancelled_compaction_closes_backend() -> None:
    closed = anyio.Event()
    with anyio.CancelScope() as scope:

        async def hang(turn: Turn) -> AsyncIterator[outputs.Output]:
            try:
                yield "half "
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                closed.set()

        await ResponsesKit(CallableBackend(hang)).compact({"model": "writer", "input": "Hi"})
    assert scope.cancelled_caught
    assert closed.is_set()


# Property tests.

_words = st.text(max_size=8) | st.sampled_from(["\U0001f600", "\u2028", "[DONE]", "x " * 300])
_ids = st.sampled_from(["a", "b", "c"])
_items = st.one_of(
    st.builds(user, _words),
    st.builds(assistant, _words),
    st.builds(system, _words, st.sampled_from(["system", "developer"])),
    st.builds(lambda call: CALL | {"call_id": call}, _ids),
    st.builds(lambda call, text: OUTPUT | {"call_id": call, "name": "f", "output": text}, _ids, _words),
    st.builds(lambda text: user([{"type": "input_text", "text": text}, IMAGE]), _words),
    st.just({"type": "reasoning", "summary": []}),
    st.just({"type": "acme:chart", "points": [1]}),
)


@given(conversation=st.lists(_items, max_size=8), window=st.sampled_from([None, 300, 5000]))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_conversation_compacts_to_valid_input(conversation: list[dict[str, Any]], window: int | None) -> None:
    compactor = Compactor(FakeBackend(context_window=window, vision=True, tools=True))
    compacted = await compactor.compact([user("Hi"), *conversation])
    assert compactor.decrypt_summary(compacted) == "A summary."
    repeated = await compactor.compact(compacted["output"])
    shorter = [item["id"] for item in repeated["output"] if item["type"] != "compaction"]
    assert set(shorter) <= {item["id"] for item in compacted["output"]}
    names = {"open": [item["call_id"] for item in compacted["output"] if item["type"] == "function_call"]}
    outs = [OUTPUT | {"call_id": call} for call in names["open"]]
    check_response(await compactor.kit.create({"input": [*compacted["output"], *outs, user("Go on.")]}, owner="ann"))


# The default model.


@pytest.mark.local
@pytest.mark.timeout(60)
def test_smallest_model_summarizes_long_conversation_in_pieces() -> None:
    from responses_kit.backends.local import LocalBackend

    backend = LocalBackend(context_length=256, threads=1)
    usages: list[Usage] = []

    async def collect(turn: Turn) -> tuple[str, Usage | None]:
        compacted = list(backend.generate(turn))
        (usage,) = (output for output in compacted if isinstance(output, Usage))
        usages.append(usage)
        assert usage.input_tokens + (turn.max_output_tokens or 0) <= 256
        return "".join(output for output in compacted if isinstance(output, str)), usage

    async def main() -> dict[str, Any]:
        return await compact(
            parse_compact_request({"model": "smollm2", "input": conversation}),
            owner="ann",
            models={model.name: model for model in backend.models if isinstance(model, Model)},
            store=MemoryStore(),
            encryptor=Encryptor([SECRET]),
            backend=backend,
            complete_turn=collect,
            now=0,
        )

    conversation = [
        message for n in range(12) for message in (user(f"Room {n} is for {n + 3} guests."), assistant("Yes, noted."))
    ]
    try:
        compacted = anyio.run(main)
    finally:
        backend.close()
    check_compacted(compacted)
    assert len(usages) > 1
    assert compacted["usage"]["input_tokens"] == sum(usage.input_tokens for usage in usages)
    assert decrypt_summary(compacted, Encryptor([SECRET]), "ann").strip()
    assert output_texts(compacted)[-2:] == ["Room 11 is for 14 guests.", "compaction"]
