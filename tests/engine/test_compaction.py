"""Compaction: what of a conversation stays, what the model is asked, and what the summary is good for afterwards."""

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


TALK = [user("We launch on Tuesday."), assistant("Noted."), user("And the weather?"), assistant("It will rain.")]


def words(turn: Turn) -> int:
    """Tokens as these tests count them: one a word."""
    said = [turn.instructions or "", *(str(message["content"]) for message in turn.messages())]
    return sum(len(text.split()) for text in said)


class Writer(Backend):
    """Sums up with what it is given; counts words where it is told to, and may have a way of its own."""

    def __init__(
        self,
        write: Callable[[Turn], str | Exception] = lambda turn: "A summary.",
        *,
        own: Callable[[Turn], Any] = lambda turn: None,
        count: Callable[[Turn], int | None] = words,
        usage: Usage | None = None,
        **abilities: Any,
    ) -> None:
        self.models = [Model("writer", **abilities), "plain"]
        self.asked: list[Turn] = []
        self.counted: list[Turn] = []
        self._write, self._own, self._count, self._usage = write, own, count, usage

    async def collect(self, turn: Turn) -> tuple[str, Usage | None]:
        """What the kit would make of a turn."""
        self.asked.append(turn)
        text = self._write(turn)
        if isinstance(text, Exception):
            raise text
        return text, self._usage

    async def count_tokens(self, turn: Turn) -> int | None:
        self.counted.append(turn)
        return self._count(turn)

    async def compact(self, turn: Turn) -> str | None:
        made = self._own(turn)
        if isinstance(made, Exception):
            raise made
        return made


class Office:
    """Compacts with one writer, one store and one secret."""

    def __init__(self, writer: Writer | None = None) -> None:
        self.writer = Writer() if writer is None else writer
        self.store = MemoryStore()
        self.seal = Encryptor([SECRET, OLDER])
        self.kit = ResponsesKit(
            ScriptedBackend(["Yes."], models=self.writer.models), store=self.store, secrets=[SECRET]
        )

    async def compact(self, given: Any = TALK, *, owner: str = "ann", **body: Any) -> dict[str, Any]:
        request = parse_compact_request({"model": "writer", "input": given, **body})
        models = {one.name: one for one in map(_model, self.writer.models)}
        made = await compact(
            request,
            owner=owner,
            models=models,
            store=self.store,
            encryptor=self.seal,
            backend=self.writer,
            complete_turn=self.writer.collect,
            now=1_700_000_000.5,
        )
        check_compacted(made)
        return made

    async def refused(self, given: Any = TALK, **body: Any) -> errors.APIError:
        with pytest.raises(errors.APIError) as caught:
            await self.compact(given, **body)
        assert len(caught.value.message) < 300
        return caught.value

    def summary_in(self, made: Mapping[str, Any], owner: str = "ann") -> str:
        return summary_in(made, self.seal, owner)

    @property
    def prompts(self) -> list[str]:
        """What the model was given to sum up, piece by piece."""
        return [turn.text for turn in self.writer.asked]


def _model(model: str | Model) -> Model:
    return Model(model) if isinstance(model, str) else model


def check_compacted(made: Mapping[str, Any]) -> None:
    """What `POST /responses/compact` has to return, whatever it was asked."""
    official.CompactResource.model_validate_json(json.dumps(made, allow_nan=False), strict=True)
    CompactedResponse.model_validate(dict(made))
    assert made.keys() == {"id", "object", "created_at", "output", "usage"}
    for item in made["output"]:
        check_item(item)
    assert len({item["id"] for item in made["output"]}) == len(made["output"])
    kinds = [item["type"] for item in made["output"]]
    place = kinds.index("compaction")
    assert kinds.count("compaction") == 1
    assert set(kinds[:place]) <= {"message"}
    assert set(kinds[place + 1 :]) <= {"function_call"}
    usage = made["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again = parse_request({"input": made["output"]}).input
    assert not isinstance(again, str)
    assert again is not None
    assert [item.model_dump(mode="json") for item in again] == made["output"], "what goes out is taken back unchanged"


def summary_in(made: Mapping[str, Any], seal: Encryptor, owner: str) -> str:
    """What the compaction says, opened."""
    (payload,) = (item["encrypted_content"] for item in made["output"] if item["type"] == "compaction")
    opened = seal.decrypt(payload, kind="compaction", owner=owner, param="")
    assert opened is not None
    summary: str = json.loads(opened)["summary"]
    return summary


def texts_of(made: Mapping[str, Any]) -> list[str]:
    """What was kept as it was, and where the compaction and the calls are."""
    return [item["content"][0]["text"] if item["type"] == "message" else item["type"] for item in made["output"]]


# What comes out.


async def test_a_conversation_becomes_its_user_messages_and_a_sealed_summary() -> None:
    office = Office(Writer(usage=Usage(30, 4, 20, 1)))
    made = await office.compact()
    assert texts_of(made) == ["We launch on Tuesday.", "And the weather?", "compaction"]
    assert (made["object"], made["created_at"], made["id"][:5]) == ("response.compaction", 1_700_000_000, "resp_")
    assert office.summary_in(made) == "A summary."
    assert "summary" not in json.dumps(made["output"])
    assert made["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 20},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 34,
    }


async def test_a_text_is_one_user_message() -> None:
    made = await Office().compact("We launch on Tuesday.")
    assert texts_of(made) == ["We launch on Tuesday.", "compaction"]


async def test_nothing_is_stored() -> None:
    office = Office()
    made = await office.compact()
    assert await office.store.get("ann", made["id"]) is None
    assert not await office.store.items("ann", [item["id"] for item in made["output"]])


async def test_what_the_system_and_the_developer_said_stays_whatever_it_takes() -> None:
    office = Office(Writer(context_window=400))
    told = system("law " * 200, "developer")
    made = await office.compact([system("Be brief."), *TALK, told, user("Go on.")])
    assert texts_of(made) == [
        "Be brief.",
        "We launch on Tuesday.",
        "And the weather?",
        "law " * 200,
        "Go on.",
        "compaction",
    ]
    assert [item["role"] for item in made["output"][:-1]] == ["system", "user", "user", "developer", "user"]
    assert not any("law" in prompt or "brief" in prompt for prompt in office.prompts)


async def test_of_the_user_the_latest_messages_stay_as_far_as_their_share_of_the_window_goes() -> None:
    office = Office(Writer(context_window=800))  # of which an eighth, 100 words, is theirs
    talk = [message for n in range(20) for message in (user(f"{n} " * 30), assistant("Yes."))]
    made = await office.compact(talk)
    assert texts_of(made) == [*(f"{n} " * 30 for n in (17, 18, 19)), "compaction"]


async def test_the_last_user_message_stays_beyond_its_share_unless_it_takes_more_than_half_the_window() -> None:
    office = Office(Writer(context_window=800))
    assert texts_of(await office.compact([*TALK, user("a " * 400)])) == ["a " * 400, "compaction"]
    assert texts_of(await office.compact([*TALK, user("a " * 401)])) == ["compaction"]


async def test_pictures_and_files_in_what_stays_stay_and_elsewhere_they_are_named() -> None:
    office = Office(Writer(vision=True))
    look = user([{"type": "input_text", "text": "Look:"}, IMAGE, {"type": "input_file", "file_data": "QQ=="}])
    made = await office.compact([look])
    assert [part["type"] for part in made["output"][0]["content"]] == ["input_text", "input_image", "input_file"]
    assert office.prompts == ["The user: Look: [a picture] [a file]"]
    seen = CALL, OUTPUT | {"output": [IMAGE, {"type": "input_video", "video_url": "https://example.org/a.mp4"}]}
    await office.compact([user("Look."), *seen])
    assert office.prompts[-1].endswith("look returned: [a picture] [a video]")


async def test_calls_that_wait_for_their_outputs_stay_behind_the_summary() -> None:
    office = Office()
    second = CALL | {"call_id": "c2", "arguments": "{"}
    made = await office.compact([user("Look."), CALL, OUTPUT, second, CALL | {"call_id": "c3"}])
    assert texts_of(made) == ["Look.", "compaction", "function_call", "function_call"]
    assert [item.get("call_id") for item in made["output"][2:]] == ["c2", "c3"]
    assert made["output"][2]["arguments"] == "{"
    results = [OUTPUT | {"call_id": "c3"}, OUTPUT | {"call_id": "c2"}]
    check_response(await office.kit.create({"input": [*made["output"], *results]}, owner="ann"))


async def test_of_calls_with_the_same_id_those_wait_that_have_no_output_of_their_own() -> None:
    made = await Office().compact([user("Look."), CALL, OUTPUT, CALL | {"arguments": "again"}])
    assert [item["arguments"] for item in made["output"] if item["type"] == "function_call"] == ["again"]


# What the model is asked.


async def test_the_model_reads_who_said_and_did_what_in_order() -> None:
    office = Office(Writer(tools=True))
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    receipt = {"type": "acme:find", "call_id": "c9", "name": "find", "arguments": "{}", "output": "found"}
    told = {"type": "function_call_output", "name": "goal", "output": "Win."}
    await office.compact([*TALK[:2], thought, CALL, OUTPUT, receipt, told, {"type": "acme:chart"}])
    assert office.prompts == [
        "The user: We launch on Tuesday.\n"
        "The assistant: Noted.\n"
        'The assistant called look({"at": "sea"})\n'
        "look returned: blue\n"
        "The assistant called find({})\n"
        "find returned: found\n"
        "The assistant called goal({})\n"
        "goal returned: Win."
    ]


async def test_the_model_is_asked_for_bounded_plain_text_without_tools_and_thoughts() -> None:
    office = Office(Writer(context_window=8000, reasoning=True, temperature=0.3, top_p=0.5))
    made = await office.compact([*TALK, assistant("word " * 6000)])
    (turn,) = office.writer.asked
    assert (turn.tools, turn.tool_choice, turn.text_format.type) == ((), "none", "text")
    assert turn.max_output_tokens == 1000
    assert turn.reasoning is not None
    assert turn.reasoning.effort == "none"
    assert (turn.temperature, turn.top_p, turn.owner, turn.response_id) == (0.3, 0.5, "ann", made["id"])
    plain = Office()
    await plain.compact(model="plain")
    assert plain.writer.asked[0].reasoning is None
    assert plain.writer.asked[0].model == "plain"


@pytest.mark.parametrize(("window", "words", "most"), [(8000, 1, 64), (8000, 1600, 500), (None, 40_000, 4096)])
async def test_a_summary_may_be_as_long_as_window_and_conversation_allow(
    window: int | None, words: int, most: int
) -> None:
    office = Office(Writer(context_window=window))
    await office.compact([assistant("word " * words)])
    asked = office.writer.asked[0].max_output_tokens
    assert asked is not None
    assert most <= asked < most + 4


async def test_instructions_are_this_requests_own_and_guide_the_summary() -> None:
    office = Office()
    first = await office.kit.create({"input": "Hi", "instructions": "Be a pirate."}, owner="ann")
    await office.compact("Go on.", previous_response_id=first["id"], instructions="Mind the dates.")
    await office.compact("Go on.", previous_response_id=first["id"])
    guided, plain = office.writer.asked
    assert guided.instructions is not None
    assert guided.instructions.endswith("Mind the dates.")
    assert "pirate" not in str(guided.instructions) + str(plain.instructions)
    assert guided.instructions.startswith(str(plain.instructions))


async def test_a_long_conversation_is_read_piece_by_piece_with_the_summary_so_far() -> None:
    office = Office(Writer(lambda turn: f"Up to here {len(office.prompts)}.", context_window=400, usage=Usage(10, 2)))
    talk = [message for n in range(40) for message in (user(f"Question {n}?"), assistant(f"Answer {n}. " * 9))]
    made = await office.compact(talk)
    assert len(office.prompts) > 2
    assert all(words(turn) <= 350 for turn in office.writer.asked)
    assert [turn.round for turn in office.writer.asked] == [*range(len(office.prompts))]
    assert office.summary_in(made) == f"Up to here {len(office.prompts)}."
    pieces = [office.prompts[0]]
    for number, prompt in enumerate(office.prompts[1:], 1):
        before, _, piece = prompt.partition("\n\nWhat was said since then:\n")
        assert before == f"Summary so far:\nUp to here {number}."
        pieces.append(piece)
    assert all(piece.endswith("\n") for piece in pieces[:-1]), "a piece ends where somebody has finished"
    said = [f"The user: Question {n}?\nThe assistant: {f'Answer {n}. ' * 9}" for n in range(40)]
    assert "".join(pieces) == "\n".join(said)
    assert made["usage"]["total_tokens"] == 12 * len(pieces)


@pytest.mark.parametrize("text", ["word " * 2000, "x" * 4000, "\U0001f600" * 1000])
async def test_a_single_message_that_is_too_long_is_read_in_pieces_too(text: str) -> None:
    def letters(turn: Turn) -> int:
        return len((turn.instructions or "") + turn.text)

    office = Office(Writer(count=letters, context_window=1000))
    await office.compact(text)
    pieces = [prompt.rpartition("since then:\n")[2] for prompt in office.prompts]
    assert len(pieces) > 1
    assert "".join(pieces) == f"The user: {text}"
    assert all(letters(turn) <= 875 for turn in office.writer.asked)


async def test_where_the_backend_cannot_count_tokens_are_guessed_and_guessed_again_if_they_were_too_many() -> None:
    def write(turn: Turn) -> str | Exception:
        return errors.ContextLengthExceeded("Too long.") if len(turn.text) > 3000 else "Short."

    office = Office(Writer(write, count=lambda turn: None, context_window=2048))
    made = await office.compact([user("a word " * 900), assistant("another " * 900)])
    asked = [len(prompt) for prompt in office.prompts]
    assert max(asked) < 4 * 2048
    assert min(asked) > 0
    assert office.summary_in(made) == "Short."
    assert made["usage"]["total_tokens"] == 0


async def test_a_backend_that_does_not_count_what_is_too_long_is_given_less() -> None:
    def count(turn: Turn) -> int:
        if words(turn) > 300:
            raise errors.ContextLengthExceeded("Too long.")
        return words(turn)

    office = Office(Writer(count=count, context_window=300))
    made = await office.compact([user("a b c d e f " * 200), assistant("another " * 400), user("Go on.")])
    assert texts_of(made) == ["Go on.", "compaction"]
    assert len(office.prompts) > 4


async def test_a_window_of_millions_is_filled_no_further_than_a_text_goes() -> None:
    office = Office(Writer(context_window=4_000_000))
    long = assistant("x" * (MAX_TEXT - 1))
    await office.compact([long, long])
    assert len(office.prompts) == 1


async def test_a_picture_counts_for_something_where_the_backend_cannot_count() -> None:
    office = Office(Writer(count=lambda turn: None, context_window=16_000, vision=True))
    made = await office.compact([user([IMAGE, {"type": "input_text", "text": f"{n}"}]) for n in range(9)])
    assert [item["content"][1]["text"] for item in made["output"][:-1]] == ["7", "8"]


async def test_a_window_that_nobody_knows_is_taken_for_a_large_one() -> None:
    office = Office(Writer(count=lambda turn: None))
    await office.compact([assistant("word " * 20_000)])
    assert len(office.prompts) == 1
    assert office.writer.asked[0].max_output_tokens == 4096


# Compacting again.


async def test_what_was_compacted_is_summed_up_with_what_came_after_it() -> None:
    office = Office(Writer(lambda turn: f"Summary {len(office.prompts)}."))
    first = await office.compact()
    second = await office.compact([*first["output"], user("Where?"), assistant("Here.")])
    assert texts_of(second) == ["We launch on Tuesday.", "And the weather?", "Where?", "compaction"]
    assert office.prompts[1].endswith(
        "The assistant: Summary of the conversation so far:\nSummary 1.\nThe user: Where?\nThe assistant: Here."
    )
    assert office.summary_in(second) == "Summary 2."


async def test_a_stored_conversation_is_compacted_by_its_id_for_its_owner_alone() -> None:
    office = Office()
    first = await office.kit.create({"input": "One?"}, owner="ann")
    second = await office.kit.create({"input": "Two?", "previous_response_id": first["id"]}, owner="ann")
    made = await office.compact(None, previous_response_id=second["id"])
    assert texts_of(made) == ["One?", "Two?", "compaction"]
    assert office.prompts == ["The user: One?\nThe assistant: Yes.\nThe user: Two?\nThe assistant: Yes."]
    foreign = await office.refused("Three?", previous_response_id=second["id"], owner="bob")
    unknown = await office.refused("Three?", previous_response_id="resp_unknown", owner="bob")
    assert foreign.payload() == unknown.payload()
    assert foreign.code == "previous_response_not_found"


async def test_a_summary_opens_for_its_owner_alone_and_after_the_secret_was_replaced() -> None:
    office = Office()
    office.seal = Encryptor([OLDER])
    made = await office.compact()
    office.seal = Encryptor([SECRET, OLDER])
    assert texts_of(await office.compact([*made["output"], user("Go on.")]))[-2:] == ["Go on.", "compaction"]
    error = await office.refused([user("Go on."), *made["output"]], owner="bob")
    assert (error.code, error.param) == ("invalid_encrypted_content", "input[3].encrypted_content")


async def test_the_next_response_knows_what_was_summed_up() -> None:
    office = Office()
    made = await office.compact()
    response = await office.kit.create({"input": [*made["output"], user("When?")]}, owner="ann")
    check_response(response)
    backend = office.kit.backend
    assert isinstance(backend, ScriptedBackend)
    assert backend.turns[-1].messages() == [
        {"role": "user", "content": "We launch on Tuesday."},
        {"role": "user", "content": "And the weather?"},
        {"role": "assistant", "content": "Summary of the conversation so far:\nA summary."},
        {"role": "user", "content": "When?"},
    ]


# A way of the backend's own.


async def test_a_backend_may_sum_up_in_a_way_of_its_own() -> None:
    seen: list[Turn] = []
    office = Office(Writer(own=lambda turn: seen.append(turn) or "Its own words."))
    made = await office.compact([system("Be brief."), *TALK], instructions="Mind the dates.")
    assert office.summary_in(made) == "Its own words."
    assert office.writer.asked == []
    (turn,) = seen
    assert [item.type for item in turn.items] == ["message"] * 5
    assert turn.instructions == "Mind the dates."
    assert (made["usage"]["input_tokens"], made["usage"]["output_tokens"]) == (words(turn), 3)


async def test_what_nobody_can_count_counts_nothing() -> None:
    office = Office(Writer(own=lambda turn: "Its own words.", count=lambda turn: None))
    assert (await office.compact())["usage"]["total_tokens"] == 0


async def test_where_the_model_does_not_say_what_it_took_it_is_counted() -> None:
    office = Office()
    made = await office.compact()
    (turn,) = office.writer.asked
    assert (made["usage"]["input_tokens"], made["usage"]["output_tokens"]) == (words(turn), 2)


@pytest.mark.parametrize("made", [LookupError("secret-host is gone"), 1, "", " \n", b"bytes"])
async def test_a_backend_that_fails_is_a_model_error_and_explained_to_the_log_alone(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "responses_kit")
    error = await Office(Writer(own=lambda turn: made)).refused()
    assert (error.status, error.code) == (500, "model_error")
    assert "secret-host" not in error.message
    assert caplog.records


async def test_a_backend_that_fails_to_count_is_a_model_error() -> None:
    def count(turn: Turn) -> int:
        raise LookupError("secret-host is gone")

    error = await Office(Writer(count=count)).refused()
    assert error.code == "model_error"


async def test_what_the_backend_refuses_reaches_the_client_as_it_is() -> None:
    full = errors.TooManyRequests("The queue is full.")
    assert await Office(Writer(lambda turn: full)).refused() is full
    assert await Office(Writer(own=lambda turn: full)).refused() is full


# What is refused.


@pytest.mark.parametrize(
    "given_input",
    [
        None,
        [],
        [system("Be brief.")],
        [{"type": "reasoning", "summary": []}],
        [{"type": "acme:chart"}],
    ],
)
async def test_where_nobody_has_said_anything_there_is_nothing_to_compact(given_input: Any) -> None:
    office = Office()
    error = await office.refused(given_input, instructions="Sum up.")
    assert (error.status, error.param) == (400, "input")
    assert office.writer.asked == []


async def test_an_unknown_model_is_refused() -> None:
    assert (await Office().refused(model="other")).code == "model_not_found"


async def test_what_the_model_cannot_read_is_refused() -> None:
    error = await Office().refused([user("Look."), user([IMAGE])])
    assert (error.code, error.param) == ("unsupported_parameter", "input[1].content[0]")


async def test_an_output_without_its_call_is_refused() -> None:
    assert (await Office().refused([user("Look."), OUTPUT])).param == "input[1].call_id"


@pytest.mark.parametrize("text", ["", " ", "\n\n"])
async def test_an_empty_summary_is_a_model_error_rather_than_a_conversation_lost(text: str) -> None:
    error = await Office(Writer(lambda turn: text)).refused()
    assert (error.status, error.code) == (500, "model_error")


@pytest.mark.parametrize("counts", [True, False])
async def test_a_conversation_beyond_measure_is_refused_before_the_model_is_asked(counts: bool) -> None:
    office = Office(Writer(count=words if counts else lambda turn: None, context_window=200))
    error = await office.refused([assistant("a word and " * 10_000)])
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "input")
    assert office.writer.asked == []


async def test_instructions_that_leave_no_room_are_refused_by_name() -> None:
    office = Office(Writer(context_window=200))
    error = await office.refused(instructions="law " * 200)
    assert (error.code, error.param) == ("context_length_exceeded", "instructions")
    assert office.writer.asked == []


async def test_a_model_that_does_not_stop_is_a_model_error() -> None:
    office = Office(Writer(lambda turn: "on and on " * 1000, context_window=400))
    error = await office.refused([assistant("word " * 1000)])
    assert error.code == "model_error"


async def test_a_backend_that_refuses_every_length_is_not_asked_for_ever() -> None:
    refusal = errors.ContextLengthExceeded("Too long.")
    office = Office(Writer(lambda turn: refusal, count=lambda turn: None))
    assert await office.refused() is refusal
    assert len(office.prompts) < 10
    counting = Office(Writer(lambda turn: refusal))
    assert await counting.refused() is refusal
    assert len(counting.prompts) == 1


async def test_a_summary_that_could_not_be_sent_back_is_a_model_error() -> None:
    for length, fits in ((MAX_TEXT // 4 * 3 - 200, True), (MAX_TEXT // 4 * 3, False), (2 * MAX_TEXT, False)):
        office = Office(Writer(own=lambda turn, length=length: "x" * length, count=lambda turn: None))
        if fits:
            made = await office.compact()
            assert len(office.summary_in(made)) == length
        else:
            assert (await office.refused()).code == "model_error"


async def test_looking_for_what_fits_costs_few_looks() -> None:
    office = Office(Writer(context_window=4000))
    await office.compact([message for n in range(2000) for message in (user(f"{n}"), assistant("Yes, that is so."))])
    assert len(office.writer.counted) < 20 + 6 * len(office.prompts)


# Through the kit.


def _in_a_thread(turn: Turn) -> Iterator[outputs.Output]:
    yield outputs.Reasoning("Hm.")
    yield "From a "
    yield outputs.Text("thread.")
    yield Usage(1, 2)
    yield outputs.Finish("max_output_tokens")


async def _refuses(turn: Turn) -> AsyncIterator[outputs.Output]:
    yield outputs.Refusal("No.")


async def _breaks(turn: Turn) -> AsyncIterator[outputs.Output]:
    yield "half "
    raise LookupError("secret-host is gone")


class Given(Backend):
    """Generates with a function."""

    def __init__(self, generate: Callable[[Turn], Any]) -> None:
        self.models = ["writer"]
        self.generate = generate  # type: ignore[method-assign]


async def test_what_was_cut_is_a_summary_all_the_same() -> None:
    made = await ResponsesKit(Given(_in_a_thread), secrets=[SECRET]).compact({"model": "writer", "input": "Hi"})
    assert summary_in(made, Encryptor([SECRET]), "") == "From a thread."
    assert made["usage"]["total_tokens"] == 3


@pytest.mark.parametrize("generate", [_refuses, _breaks, lambda turn: []])
async def test_a_model_that_gives_no_summary_is_a_model_error(generate: Callable[[Turn], Any]) -> None:
    with pytest.raises(errors.ModelError) as caught:
        await ResponsesKit(Given(generate)).compact({"model": "writer", "input": "Hi"})
    assert "secret-host" not in caught.value.message


async def test_a_compaction_that_is_cancelled_closes_its_backend() -> None:
    closed = anyio.Event()
    with anyio.CancelScope() as scope:

        async def hangs(turn: Turn) -> AsyncIterator[outputs.Output]:
            try:
                yield "half "
                scope.cancel()
                await anyio.sleep_forever()
            finally:
                closed.set()

        await ResponsesKit(Given(hangs)).compact({"model": "writer", "input": "Hi"})
    assert scope.cancelled_caught
    assert closed.is_set()


# Anything at all.

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


@given(talk=st.lists(_items, max_size=8), window=st.sampled_from([None, 300, 5000]))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_conversation_comes_to_one_compaction_that_can_be_sent_back_and_compacted_again(
    talk: list[dict[str, Any]], window: int | None
) -> None:
    office = Office(Writer(context_window=window, vision=True, tools=True))
    made = await office.compact([user("Hi"), *talk])
    assert office.summary_in(made) == "A summary."
    again = await office.compact(made["output"])
    shorter = [item["id"] for item in again["output"] if item["type"] != "compaction"]
    assert set(shorter) <= {item["id"] for item in made["output"]}
    names = {"open": [item["call_id"] for item in made["output"] if item["type"] == "function_call"]}
    outs = [OUTPUT | {"call_id": call} for call in names["open"]]
    check_response(await office.kit.create({"input": [*made["output"], *outs, user("Go on.")]}, owner="ann"))


# The default model.


@pytest.mark.local
@pytest.mark.timeout(60)
def test_the_smallest_model_reads_a_long_conversation_piece_by_piece() -> None:
    from responses_kit.backends.local import LocalBackend

    backend = LocalBackend(context_length=256, threads=1)
    asked: list[Usage] = []

    async def collect(turn: Turn) -> tuple[str, Usage | None]:
        made = list(backend.generate(turn))
        (usage,) = (output for output in made if isinstance(output, Usage))
        asked.append(usage)
        assert usage.input_tokens + (turn.max_output_tokens or 0) <= 256
        return "".join(output for output in made if isinstance(output, str)), usage

    async def main() -> dict[str, Any]:
        return await compact(
            parse_compact_request({"model": "smollm2", "input": talk}),
            owner="ann",
            models={model.name: model for model in backend.models if isinstance(model, Model)},
            store=MemoryStore(),
            encryptor=Encryptor([SECRET]),
            backend=backend,
            complete_turn=collect,
            now=0,
        )

    talk = [said for n in range(12) for said in (user(f"Room {n} is for {n + 3} guests."), assistant("Yes, noted."))]
    try:
        made = anyio.run(main)
    finally:
        backend.close()
    check_compacted(made)
    assert len(asked) > 1
    assert made["usage"]["input_tokens"] == sum(usage.input_tokens for usage in asked)
    assert summary_in(made, Encryptor([SECRET]), "ann").strip()
    assert texts_of(made)[-2:] == ["Room 11 is for 14 guests.", "compaction"]
