"""Tests of the context of a request: the turn, the echo in the response, and early refusals."""

from __future__ import annotations

from typing import Any

import pytest

from responses_kit import Model, ResponsesKit, Turn, errors, outputs
from responses_kit.protocol.encryption import Encryptor
from responses_kit.schema.items import Compaction
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_response

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

ALL_CAPABILITIES: dict[str, bool] = {
    "vision": True,
    "tools": True,
    "reasoning": True,
    "structured_output": True,
    "logprobs": True,
}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
SUB = {"type": "function", "name": "sub"}
IMAGE = {"type": "input_image", "image_url": "https://example.org/cat.png"}
SECRET = "the secret of these tests"


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text, **more}


class ContextHarness:
    """A kit with a scripted backend, and the turns that it received."""

    def __init__(self, *scripts: Any, **capabilities: Any) -> None:
        model = Model("scripted", **(ALL_CAPABILITIES | capabilities))
        self.backend = ScriptedBackend(*(scripts or (["Yes."],)), models=[model, "plain"])
        self.kit = ResponsesKit(self.backend, secrets=[SECRET])

    async def ask(self, given: Any = "Hi", *, owner: str = "", **body: Any) -> dict[str, Any]:
        response = await self.kit.create({"input": given, **body}, owner=owner)
        check_response(response)
        return response

    async def refused(self, given: Any = "Hi", *, owner: str = "", **body: Any) -> errors.APIError:
        with pytest.raises(errors.InvalidRequest) as caught:
            await self.kit.create({"input": given, **body}, owner=owner)
        assert len(caught.value.message) < 300
        return caught.value

    @property
    def turn(self) -> Turn:
        return self.backend.turns[-1]

    @property
    def chat(self) -> list[tuple[str, Any]]:
        return [(message["role"], message["content"]) for message in self.turn.messages()]


# Input.


async def test_string_and_list_input_are_equivalent() -> None:
    harness = ContextHarness()
    for given in ("Hi", [user("Hi")], [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]):
        await harness.ask(given)
        assert harness.chat == [("user", "Hi")]
        assert harness.turn.text == "Hi"


@pytest.mark.parametrize("body", [{"input": []}, {"input": None}, {}])
async def test_empty_request_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        await ContextHarness().kit.create(body)
    assert caught.value.param == "input"


async def test_instructions_alone_are_accepted() -> None:
    harness = ContextHarness()
    await harness.ask(None, instructions="Tell a joke.")
    assert harness.chat == [("system", "Tell a joke.")]


async def test_every_role_reaches_model_in_order() -> None:
    harness = ContextHarness()
    roles = ["system", "developer", "user", "assistant", "user"]
    await harness.ask([{"role": role, "content": f"{n}"} for n, role in enumerate(roles)], instructions="First.")
    assert harness.chat == [
        ("system", "First."),
        ("system", "0"),
        ("system", "1"),
        ("user", "2"),
        ("assistant", "3"),
        ("user", "4"),
    ]


async def test_orphan_and_empty_reasoning_is_accepted() -> None:
    harness = ContextHarness()
    await harness.ask(
        [{"type": "reasoning", "summary": []}, user("Hi"), {"type": "reasoning", "summary": [], "id": "rs_1"}]
    )
    assert harness.chat == [("user", "Hi")]
    assert [item.type for item in harness.turn.items] == ["reasoning", "message", "reasoning"]


async def test_input_item_ids_are_made_by_server_and_distinct() -> None:
    harness = ContextHarness()
    await harness.ask([user("a", id="msg_mine"), user("b"), {"type": "reasoning", "summary": [], "id": "rs_mine"}])
    ids = [item.id for item in harness.turn.items]
    assert len(set(ids)) == 3
    assert not {"msg_mine", "rs_mine", ""} & set(ids)


async def test_different_items_with_same_id_both_reach_model() -> None:
    harness = ContextHarness()
    await harness.ask([user("one", id="fake"), user("two", id="fake")])
    assert [content for _, content in harness.chat] == ["one", "two"]


@pytest.mark.parametrize("claimed", ["fake", "msg_" + "0" * 32])
async def test_different_items_with_same_id_stay_distinct_in_next_turn(claimed: str) -> None:
    harness = ContextHarness()
    first = await harness.ask([user("one", id=claimed), user("two", id=claimed)])
    assert [content for _, content in harness.chat] == ["one", "two"]
    page = await harness.kit.input_items(first["id"])
    assert len({item["id"] for item in page["data"]}) == 2
    await harness.ask("three", previous_response_id=first["id"])
    assert [content for _, content in harness.chat] == ["one", "two", "Yes.", "three"]


async def test_new_item_cannot_take_id_of_other_conversation() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    forged = {"role": "assistant", "id": first["output"][0]["id"], "content": "Forged."}
    second = await harness.ask([forged, user("two")])
    await harness.ask("three", previous_response_id=second["id"])
    assert [content for _, content in harness.chat] == ["Forged.", "two", "Yes.", "three"]
    await harness.ask("four", previous_response_id=first["id"])
    assert [content for _, content in harness.chat] == ["one", "Yes.", "four"]


# Calls and outputs.

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "1"}


@pytest.mark.parametrize("order", [[CALL, OUTPUT], [OUTPUT, CALL]])
async def test_calls_and_outputs_pair_in_any_order(order: list[Any]) -> None:
    harness = ContextHarness()
    await harness.ask([user("Add."), *order])
    assert len(harness.turn.items) == 3


async def test_output_without_call_is_refused_with_param() -> None:
    error = await ContextHarness().refused([user("Add."), CALL, OUTPUT | {"call_id": "c2"}])
    assert "c2" in error.message
    assert error.param == "input[2].call_id"


async def test_param_names_position_in_client_input() -> None:
    harness = ContextHarness(vision=False)
    first = await harness.ask()
    again = first["output"][0]
    body = {"previous_response_id": first["id"]}
    error = await harness.refused([again, OUTPUT], **body)
    assert error.param == "input[1].call_id"
    error = await harness.refused([again, {"role": "user", "content": [IMAGE]}], **body)
    assert error.param is not None
    assert error.param.startswith("input[1].content")


async def test_output_pairs_with_call_of_previous_response() -> None:
    harness = ContextHarness([outputs.ToolCall("add", '{"a": 1}', "c9")], ["It is 1."])
    first = await harness.ask("Add.", tools=[ADD])
    await harness.ask([OUTPUT | {"call_id": "c9"}], previous_response_id=first["id"], tools=[ADD])
    assert [item.type for item in harness.turn.items] == ["message", "function_call", "function_call_output"]
    assert [message["role"] for message in harness.turn.messages()] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("arguments", ["", "{", "null", '{"a": 1}'])
async def test_broken_arguments_in_history_are_unchanged(arguments: str) -> None:
    harness = ContextHarness()
    await harness.ask([user("Add."), CALL | {"arguments": arguments}, OUTPUT])
    (call,) = harness.turn.messages()[1]["tool_calls"]
    assert call["function"]["arguments"] == arguments


async def test_parallel_calls_form_one_assistant_message() -> None:
    harness = ContextHarness()
    second = {"call_id": "c2"}
    await harness.ask(
        [user("Add."), CALL, CALL | second, OUTPUT, OUTPUT | second | {"output": [{"type": "input_text", "text": "2"}]}]
    )
    messages = harness.turn.messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert [(message["tool_call_id"], message["content"]) for message in messages[2:]] == [("c1", "1"), ("c2", "2")]


# Chains.


async def test_chain_reaches_model_whole_and_in_order() -> None:
    harness = ContextHarness(lambda turn: [turn.text.upper()])
    last = None
    for text in ("one", "two", "three"):
        last = (await harness.ask(text, previous_response_id=last))["id"]
    assert [content for _, content in harness.chat] == ["one", "ONE", "two", "TWO", "three"]


async def test_chain_holds_emitted_items() -> None:
    harness = ContextHarness([outputs.Reasoning("Hm."), "Yes.", outputs.Message("final_answer"), "Really."])
    first = await harness.ask()
    await harness.ask("Sure?", previous_response_id=first["id"])
    assert [item.id for item in harness.turn.items[1:-1]] == [item["id"] for item in first["output"]]


async def test_chain_may_be_continued_without_input_and_twice() -> None:
    harness = ContextHarness()
    first = await harness.ask("Go on.")
    for _ in range(2):
        await harness.ask(None, previous_response_id=first["id"])
        assert [content for _, content in harness.chat] == ["Go on.", "Yes."]


async def test_item_in_chain_and_input_reaches_model_once() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    page = await harness.kit.input_items(first["id"])
    await harness.ask([*page["data"], *first["output"], user("two")], previous_response_id=first["id"])
    assert [content for _, content in harness.chat] == ["one", "Yes.", "two"]


async def test_instructions_do_not_carry_over_but_system_messages_do() -> None:
    harness = ContextHarness()
    first = await harness.ask([{"role": "developer", "content": "Be brief."}, user("Hi")], instructions="Be a pirate.")
    second = await harness.ask("Hi again", previous_response_id=first["id"])
    assert harness.turn.instructions is None
    assert second["instructions"] is None
    assert harness.chat[0] == ("system", "Be brief.")


@pytest.mark.parametrize("previous", ["resp_unknown", "", "msg_1"])
async def test_unknown_previous_response_is_refused_with_400(previous: str) -> None:
    error = await ContextHarness().refused(previous_response_id=previous)
    assert (error.status, error.code, error.param) == (400, "previous_response_not_found", "previous_response_id")


async def test_foreign_previous_response_is_unknown() -> None:
    harness = ContextHarness()
    foreign_response = await harness.ask(owner="ann")
    error = await harness.refused(owner="bob", previous_response_id=foreign_response["id"])
    unknown = await harness.refused(owner="bob", previous_response_id="resp_unknown")
    assert error.payload() == unknown.payload()


async def test_unstored_response_cannot_be_continued() -> None:
    harness = ContextHarness()
    first = await harness.ask(store=False)
    assert first["store"] is False
    error = await harness.refused(previous_response_id=first["id"])
    assert error.code == "previous_response_not_found"


async def test_chain_with_gap_is_refused() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    second = await harness.ask("two", previous_response_id=first["id"])
    await harness.kit.delete(first["id"])
    error = await harness.refused("three", previous_response_id=second["id"])
    assert error.code == "previous_response_not_found"


async def test_response_in_progress_cannot_be_continued() -> None:
    harness = ContextHarness()
    run = await harness.kit.service.create_run({"input": "Hi"})
    error = await harness.refused(previous_response_id=run.response["id"])
    assert error.code == "previous_response_in_progress"
    await run.execute(_discard_events)
    await harness.ask("And now?", previous_response_id=run.response["id"])


async def _discard_events(events: list[Any]) -> None:
    """Accept all events."""


async def test_unfinished_response_can_be_continued() -> None:
    harness = ContextHarness(["Once upon", outputs.Finish("max_output_tokens")], ["a time."])
    first = await harness.ask("Emit.")
    await harness.ask("Go on.", previous_response_id=first["id"])
    assert [content for _, content in harness.chat] == ["Emit.", "Once upon", "Go on."]


# Item references.


def reference(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


async def test_item_reference_resolves_to_input_or_output_item() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    (given,) = (await harness.kit.input_items(first["id"]))["data"]
    await harness.ask([reference(given["id"]), {"id": first["output"][0]["id"]}, user("two")])
    assert [content for _, content in harness.chat] == ["one", "Yes.", "two"]
    assert [item.id for item in harness.turn.items[:2]] == [given["id"], first["output"][0]["id"]]


async def test_item_reference_into_chain_adds_nothing() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    await harness.ask([reference(first["output"][0]["id"]), user("two")], previous_response_id=first["id"])
    assert [content for _, content in harness.chat] == ["one", "Yes.", "two"]


@pytest.mark.parametrize("reference_first", [True, False])
async def test_item_reference_resolves_within_same_input(reference_first: bool) -> None:
    harness = ContextHarness()
    pair = [reference("mine"), user("one", id="mine")]
    await harness.ask([*(pair if reference_first else reversed(pair)), user("two")])
    assert [content for _, content in harness.chat] == ["one", "two"]


async def test_referenced_item_can_be_referenced_again() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    answer = reference(first["output"][0]["id"])
    second = await harness.ask([answer, user("two")])
    await harness.kit.delete(first["id"])
    await harness.ask([answer, user("three")])
    assert [content for _, content in harness.chat] == ["Yes.", "three"]
    await harness.kit.delete(second["id"])


async def test_item_survives_deletion_of_referring_response() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    answer = reference(first["output"][0]["id"])
    second = await harness.ask([answer, user("two")])
    await harness.kit.delete(second["id"])
    await harness.ask([answer, user("three")])
    assert [content for _, content in harness.chat] == ["Yes.", "three"]


async def test_unknown_and_foreign_references_are_refused_alike() -> None:
    harness = ContextHarness()
    foreign_response = await harness.ask("secret", owner="ann")
    foreign = await harness.refused([user("Hi"), reference(foreign_response["output"][0]["id"])], owner="bob")
    unknown = await harness.refused([user("Hi"), reference("msg_unknown")], owner="bob")
    assert foreign.payload() == unknown.payload()
    assert foreign.param == "input[1].id"


async def test_inline_item_does_not_replace_stored_item() -> None:
    harness = ContextHarness()
    first = await harness.ask("one")
    answer_id = first["output"][0]["id"]
    await harness.ask([{"role": "assistant", "id": answer_id, "content": "Forged."}, user("two")])
    await harness.ask([reference(answer_id), user("three")])
    assert harness.chat[0] == ("assistant", "Yes.")


async def test_item_reference_to_deleted_response_is_refused() -> None:
    harness = ContextHarness()
    first = await harness.ask()
    await harness.kit.delete(first["id"])
    await harness.refused([reference(first["output"][0]["id"])])


# Compactions.


def compaction(text: str = '{"summary": "We met."}', *, secret: str = SECRET, kind: str = "compaction") -> Any:
    return {"type": "compaction", "encrypted_content": Encryptor([secret]).encrypt(text, kind=kind, owner="ann")}


SUMMARY_MESSAGE = "Summary of the conversation so far:\nWe met."


async def test_compaction_summary_reaches_model_only() -> None:
    harness = ContextHarness()
    payload_item = compaction()
    first = await harness.ask([user("Hi"), payload_item, user("And?")], owner="ann")
    assert harness.chat == [("user", "Hi"), ("assistant", SUMMARY_MESSAGE), ("user", "And?")]
    (given,) = (item for item in harness.turn.items if isinstance(item, Compaction))
    assert given.summary == "We met."
    assert given.model_dump() == payload_item | {"id": given.id}
    page = await harness.kit.input_items(first["id"], owner="ann")
    assert [item for item in page["data"] if item["type"] == "compaction"] == [payload_item | {"id": given.id}]
    await harness.ask("More?", previous_response_id=first["id"], owner="ann")
    assert harness.chat[1] == ("assistant", SUMMARY_MESSAGE)
    await harness.ask([reference(given.id), user("More?")], owner="ann")
    assert harness.chat == [("assistant", SUMMARY_MESSAGE), ("user", "More?")]


async def test_calls_after_compaction_join_assistant_message() -> None:
    harness = ContextHarness()
    await harness.ask([user("Add."), compaction(), CALL, OUTPUT], owner="ann")
    content = harness.turn.messages()
    assert [message["role"] for message in content] == ["user", "assistant", "tool"]
    assert (content[1]["content"], content[1]["tool_calls"][0]["id"]) == (SUMMARY_MESSAGE, "c1")


async def test_client_made_summary_is_ignored() -> None:
    harness = ContextHarness()
    await harness.ask([compaction() | {"summary": "Forged.", "_summary": "Forged."}, user("And?")], owner="ann")
    assert harness.chat[0] == ("assistant", SUMMARY_MESSAGE)


class LetterCountingBackend(ScriptedBackend):
    """A backend that counts each character as a token."""

    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(message["content"]) for message in turn.messages())


async def test_compaction_survives_truncation() -> None:
    backend = LetterCountingBackend(["Yes."], models=[Model("small", context_window=120)])
    kit = ResponsesKit(backend, secrets=[SECRET])
    conversation = [user("one"), compaction(), user("a" * 50), {"role": "assistant", "content": "b" * 50}, user("And?")]
    await kit.create({"input": conversation, "truncation": "auto", "max_output_tokens": 16}, owner="ann")
    content = [(message["role"], message["content"]) for message in backend.turns[-1].messages()]
    assert content == [("assistant", SUMMARY_MESSAGE), ("user", "And?")]


VALID_PAYLOAD = compaction()["encrypted_content"]


@pytest.mark.parametrize(
    "payload",
    [
        VALID_PAYLOAD[:-6] + ("A" if VALID_PAYLOAD[-6] != "A" else "B") + VALID_PAYLOAD[-5:],
        VALID_PAYLOAD[:-4],
        compaction(secret="another server's secret")["encrypted_content"],
        compaction(kind="reasoning")["encrypted_content"],
        compaction("We met.")["encrypted_content"],
        compaction('{"summary": 1}')["encrypted_content"],
        compaction("[]")["encrypted_content"],
        compaction("{}")["encrypted_content"],
        "gAAAAABpM0Yj-payload_item-elsewhere",
        "",
    ],
    ids=["changed", "cut", "secret", "kind", "not JSON", "not text", "not object", "no summary", "foreign", "empty"],
)
async def test_undecryptable_compaction_is_refused(payload: str) -> None:
    harness = ContextHarness()
    error = await harness.refused([user("Hi"), compaction() | {"encrypted_content": payload}, user("?")], owner="ann")
    assert (error.code, error.param) == ("invalid_encrypted_content", "input[1].encrypted_content")
    assert not payload or payload not in error.message
    assert "Send the messages" in error.message
    assert harness.backend.turns == []


async def test_compaction_is_bound_to_owner() -> None:
    error = await ContextHarness().refused([compaction(), user("Hi")], owner="bob")
    assert (error.code, error.param) == ("invalid_encrypted_content", "input[0].encrypted_content")


async def test_undecryptable_compaction_in_chain_is_refused_with_param() -> None:
    harness = ContextHarness()
    first = await harness.ask([compaction(), user("Hi")], owner="ann")
    later = ResponsesKit(ScriptedBackend(["Yes."]), store=harness.kit.store, secrets=["a new secret altogether"])
    with pytest.raises(errors.InvalidRequest) as caught:
        await later.create({"input": "And?", "previous_response_id": first["id"]}, owner="ann")
    assert (caught.value.code, caught.value.param) == ("invalid_encrypted_content", "previous_response_id")


# Unsupported features.


async def test_unknown_model_is_refused_and_missing_model_is_first() -> None:
    harness = ContextHarness()
    assert (await harness.refused(model="other")).code == "model_not_found"
    assert (await harness.ask())["model"] == "scripted"
    assert (await harness.ask(model="plain"))["model"] == "plain"


@pytest.mark.parametrize(
    ("ability", "body", "param"),
    [
        (
            "vision",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Look"}, IMAGE]}]},
            "input[0].content[1]",
        ),
        ("vision", {"input": [user("Hi"), CALL, OUTPUT | {"output": [IMAGE]}]}, "input[2].output[0]"),
        (
            "vision",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "QQ=="}]}]},
            "input[0].content[0]",
        ),
        ("tools", {"tools": [ADD]}, "tools"),
        ("structured_output", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("structured_output", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ("logprobs", {"top_logprobs": 1}, "top_logprobs"),
        ("logprobs", {"include": ["message.output_text.logprobs"]}, "include"),
        ("reasoning", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
async def test_unsupported_features_are_refused_with_param(ability: str, body: dict[str, Any], param: str) -> None:
    request = {"given": "Hi", **body}
    request["given"] = request.pop("input", "Hi")
    error = await ContextHarness(**{ability: False}).refused(**request)
    assert (error.code, error.param) == ("unsupported_parameter", param)
    await ContextHarness(["{}"]).ask(**request)


async def test_image_in_chain_is_refused_without_vision() -> None:
    harness = ContextHarness()
    first = await harness.ask([{"role": "user", "content": [IMAGE]}])
    error = await harness.refused(model="plain", previous_response_id=first["id"])
    assert error.param == "previous_response_id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
async def test_unsupported_parameters_are_refused(body: dict[str, Any], param: str) -> None:
    assert (await ContextHarness().refused(**body)).param == param


@pytest.mark.parametrize("effort", [None, "none"])
async def test_reasoning_effort_none_is_accepted_without_capability(effort: str | None) -> None:
    response = await ContextHarness(reasoning=False).ask(reasoning={"effort": effort})
    assert response["reasoning"] == {"effort": effort, "summary": None}


# Tools.


@pytest.mark.parametrize(
    "kind",
    [
        "web_search",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "mcp",
        "image_generation",
        "computer_use_preview",
        "acme:search",
    ],
)
async def test_unavailable_server_tool_is_refused(kind: str) -> None:
    error = await ContextHarness().refused(tools=[ADD, {"type": kind, "server_url": "https://example.org"}])
    assert (error.code, error.param) == ("unsupported_parameter", "tools[1].type")


@pytest.mark.parametrize("kind", ["custom", "namespace", "local_shell", "apply_patch"])
async def test_unknown_client_tool_is_left_out_of_prompt_and_echo(kind: str) -> None:
    harness = ContextHarness()
    response = await harness.ask(tools=[{"type": kind, "name": "x", "tools": [1]}, ADD])
    assert [tool["name"] for tool in response["tools"]] == ["add"]
    assert [tool.name for tool in harness.turn.tools] == ["add"]


async def test_tools_are_echoed_with_all_members() -> None:
    response = await ContextHarness().ask(tools=[ADD, SUB])
    assert response["tools"] == [ADD, SUB | {"description": None, "parameters": None, "strict": None}]


async def test_named_output_without_call_stands_for_call() -> None:
    harness = ContextHarness(["Fine."])
    named_output = {"type": "function_call_output", "name": "goal", "output": "Win."}
    first = await harness.ask([{"role": "user", "content": "Hi"}, named_output, named_output])
    await harness.ask("Go on.", previous_response_id=first["id"])
    for turn in harness.backend.turns:
        _, one, result, other, again, *_ = turn.messages()
        (call,), (second,) = one["tool_calls"], other["tool_calls"]
        assert (call["function"], result["content"]) == ({"name": "goal", "arguments": "{}"}, "Win.")
        assert result["tool_call_id"] == call["id"] != second["id"] == again["tool_call_id"]
    assert (await harness.refused([named_output | {"name": None}])).param == "input[0].call_id"
    assert (await harness.refused([{"type": "function_call_output", "output": "Win."}])).param == "input[0].call_id"


async def test_strict_schemas_are_bounded_together() -> None:
    parameters = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1000)}}
    tools = [{"type": "function", "name": f"f{number}", "parameters": parameters} for number in range(50)]
    await ContextHarness().ask(tools=tools)
    refusal = await ContextHarness().refused(tools=[tool | {"strict": True} for tool in tools])
    assert (refusal.param, refusal.code) == ("tools", "invalid_request")


async def test_duplicate_tool_name_is_refused() -> None:
    assert (await ContextHarness().refused(tools=[ADD, SUB, ADD])).param == "tools[2]"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "name": "mul"}, "tool_choice.name"),
        (
            {
                "type": "allowed_tools",
                "tools": [{"type": "function", "name": "add"}, {"type": "function", "name": "mul"}],
            },
            "tool_choice.tools[1].name",
        ),
    ],
)
async def test_tool_choice_of_unknown_tool_is_refused(choice: Any, param: str) -> None:
    assert (await ContextHarness().refused(tools=[ADD, SUB], tool_choice=choice)).param == param


async def test_required_tool_choice_without_tools_is_refused() -> None:
    assert (await ContextHarness().refused(tool_choice="required")).param == "tool_choice"
    assert (
        await ContextHarness().refused(tool_choice="required", tools=[{"type": "custom", "name": "x"}])
    ).param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ("none", ["Yes."]),
        ("auto", ["Yes."]),
        ("required", [outputs.ToolCall("add")]),
        ({"type": "function", "name": "add"}, [outputs.ToolCall("add")]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            [outputs.ToolCall("add")],
        ),
    ],
)
async def test_tool_choice_is_echoed_as_applied(choice: Any, script: list[outputs.Output]) -> None:
    harness = ContextHarness(script)
    assert (await harness.ask(tools=[ADD], tool_choice=choice))["tool_choice"] == choice
    assert harness.turn.must_call is (script != ["Yes."])


async def test_tools_with_choice_none_are_accepted_without_capability() -> None:
    await ContextHarness(tools=False).ask(tools=[ADD], tool_choice="none")


# The text format and the echo.


@pytest.mark.parametrize(
    ("given", "applied", "echoed"),
    [
        (None, "text", {"type": "text"}),
        ({"type": "text"}, "text", {"type": "text"}),
        ({"type": "json_object"}, "json_object", {"type": "json_object"}),
        ({"type": "json_schema"}, "json_object", {"type": "json_object"}),
        ({"type": "json_schema", "name": "x", "schema": None}, "json_object", {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
            "json_schema",
            {"type": "json_schema", "name": "x", "description": None, "schema": None, "strict": False},
        ),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True, "description": "An x."},
            "json_schema",
            {"type": "json_schema", "name": "x", "description": "An x.", "schema": None, "strict": True},
        ),
        (
            {"type": "json_schema", "schema": {"type": "object"}},
            "json_schema",
            {"type": "json_schema", "name": "", "description": None, "schema": None, "strict": False},
        ),
    ],
)
async def test_text_format_reaches_model_and_is_echoed(given: Any, applied: str, echoed: dict[str, Any]) -> None:
    harness = ContextHarness(["{}"])
    response = await harness.ask(text={"format": given})
    assert harness.turn.text_format.type == applied
    assert response["text"] == {"format": echoed}
    if applied == "json_schema":
        assert harness.turn.text_format.model_dump(by_alias=True)["schema"] == {"type": "object"}


@pytest.mark.parametrize("schema", [{"type": "secretword"}, {"$ref": "https://example.org/secretword"}, {"allOf": 1}])
@pytest.mark.parametrize("param", ["text.format.schema", "tools[1].parameters"])
async def test_invalid_schema_is_refused_with_param_without_echo(param: str, schema: Any) -> None:
    harness = ContextHarness()
    if param.startswith("text"):
        body: dict[str, Any] = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    else:
        body = {"tools": [SUB, ADD | {"parameters": schema}]}
    error = await harness.refused(**body)
    assert (error.code, error.param) == ("invalid_schema", param)
    assert "secretword" not in error.message
    assert harness.backend.turns == []


async def test_unenforced_schema_is_not_validated() -> None:
    await ContextHarness().ask(tools=[ADD | {"parameters": {"type": "of their own"}, "strict": False}])


async def test_verbosity_is_echoed_only_if_sent() -> None:
    assert (await ContextHarness().ask(text={"verbosity": "low"}))["text"] == {
        "format": {"type": "text"},
        "verbosity": "low",
    }
    assert (await ContextHarness().ask(text={"verbosity": None}))["text"] == {"format": {"type": "text"}}


async def test_missing_sampling_values_are_model_defaults() -> None:
    harness = ContextHarness(temperature=0.2, top_p=0.9)
    response = await harness.ask()
    assert (response["temperature"], response["top_p"]) == (harness.turn.temperature, harness.turn.top_p) == (0.2, 0.9)
    response = await harness.ask(temperature=0, top_p=1, presence_penalty=-1, frequency_penalty=0.5)
    assert (response["temperature"], response["top_p"]) == (harness.turn.temperature, harness.turn.top_p) == (0, 1)
    assert (response["presence_penalty"], response["frequency_penalty"]) == (-1, 0.5)
    assert (harness.turn.presence_penalty, harness.turn.frequency_penalty) == (-1, 0.5)


async def test_parameters_reach_turn_and_echo() -> None:
    harness = ContextHarness()
    body: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "top_logprobs": 2,
        "truncation": "auto",
        "metadata": {"k": "v"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "prompt_cache_key": "p",
    }
    response = await harness.ask(owner="ann", **body)
    assert {name: response[name] for name in body} == body
    turn = harness.turn
    assert (turn.instructions, turn.max_output_tokens, turn.parallel_tool_calls) == ("Be brief.", 50, False)
    assert (turn.top_logprobs, turn.logprobs, turn.truncation) == (2, True, "auto")
    assert (turn.owner, dict(turn.metadata), turn.response_id) == ("ann", {"k": "v"}, response["id"])
    assert turn.reasoning is not None
    assert turn.reasoning.effort == "low"


async def test_max_output_tokens_has_no_default() -> None:
    harness = ContextHarness()
    response = await harness.ask()
    assert response["max_output_tokens"] is None
    assert harness.turn.max_output_tokens is None


async def test_messages_hold_images_files_and_videos() -> None:
    harness = ContextHarness()
    parts = [
        {"type": "input_text", "text": "Look:"},
        IMAGE,
        {"type": "input_file", "filename": "a.txt", "file_data": "QQ=="},
        {"type": "input_video", "video_url": "https://example.org/a.mp4"},
    ]
    await harness.ask([{"role": "user", "content": parts}])
    assert harness.turn.text == "Look:"
    assert harness.turn.messages()[0]["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png", "detail": "auto"}},
        {"type": "file", "file": {"filename": "a.txt", "file_data": "QQ=="}},
        {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
    ]


async def test_conversation_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_kit.context.history._MAX_CONVERSATION_BYTES", 20_000)
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    previous, turns = (await kit.create({"input": "Hello"}))["id"], 1
    while turns < 6:
        previous, turns = (await kit.create({"input": "x" * 3000, "previous_response_id": previous}))["id"], turns + 1
    with pytest.raises(errors.ContextLengthExceeded) as refused:
        await kit.create({"input": "And now?", "previous_response_id": previous})
    assert refused.value.param == "previous_response_id"
    assert (await kit.retrieve(str(previous)))["status"] == "completed"
