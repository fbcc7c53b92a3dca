"""Sealed payloads: they open for their owner, for their purpose and with the right secret, and for nobody else."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import ResponsesKit, errors, outputs
from responses_kit.protocol.encryption import Encryptor
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_response, check_stream

SECRET, OTHER = "correct horse battery", "staple, battery, horse"

texts = st.text(max_size=40)


def opened(seal: Encryptor, sealed: str, *, kind: str = "reasoning", owner: str = "ann") -> str | None:
    return seal.decrypt(sealed, kind=kind, owner=owner, param="input[0].encrypted_content")


def refused(seal: Encryptor, sealed: str, **whose: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        opened(seal, sealed, **whose)
    error = caught.value
    assert (error.param, error.code) == ("input[0].encrypted_content", "invalid_encrypted_content")
    assert sealed[:8] not in error.message


@given(text=texts, kind=st.text(max_size=8), owner=st.text(max_size=8))
def test_what_was_sealed_opens_to_the_same_text_in_every_process_with_the_secret(
    text: str, kind: str, owner: str
) -> None:
    sealed = Encryptor([SECRET]).encrypt(text, kind=kind, owner=owner)
    assert opened(Encryptor([SECRET]), sealed, kind=kind, owner=owner) == text


def test_lone_surrogates_are_sealed_as_what_is_shown_for_them() -> None:
    seal = Encryptor([SECRET])
    assert opened(seal, seal.encrypt("a\ud83d", kind="reasoning", owner="ann")) == "a\ufffd"
    assert opened(seal, seal.encrypt("\ud83d\ude00", kind="reasoning", owner="ann")) == "\U0001f600"


@pytest.mark.parametrize("owner", ["\ud83d", "a\0b", ""])
def test_any_owner_has_payloads_of_its_own(owner: str) -> None:
    seal = Encryptor([SECRET])
    sealed = seal.encrypt("text", kind="reasoning", owner=owner)
    assert opened(seal, sealed, owner=owner) == "text"
    refused(seal, sealed, owner=owner + "x")


def test_a_payload_shows_nothing_of_its_text_and_no_two_are_alike() -> None:
    seal = Encryptor([SECRET])
    first, second = (seal.encrypt("hidden " * 10, kind="reasoning", owner="ann") for _ in range(2))
    assert first != second
    for sealed in (first, second):
        assert sealed.startswith("rk1.")
        assert sealed.isascii()
        assert b"hidden" not in base64.urlsafe_b64decode(sealed.rpartition(".")[2])


def test_a_payload_opens_for_its_owner_and_its_purpose_alone() -> None:
    seal = Encryptor([SECRET])
    sealed = seal.encrypt("text", kind="reasoning", owner="ann")
    refused(seal, sealed, owner="bob")
    refused(seal, sealed, owner="")
    refused(seal, sealed, kind="compaction")


def test_a_payload_of_another_secret_is_refused() -> None:
    refused(Encryptor([OTHER]), Encryptor([SECRET]).encrypt("text", kind="reasoning", owner="ann"))


def test_without_secrets_each_kit_has_one_of_its_own() -> None:
    seal = Encryptor()
    sealed = seal.encrypt("text", kind="reasoning", owner="ann")
    assert opened(seal, sealed) == "text"
    refused(Encryptor(), sealed)


def test_secrets_can_be_replaced_while_old_payloads_still_open() -> None:
    old = Encryptor([SECRET]).encrypt("old", kind="reasoning", owner="ann")
    both = Encryptor([OTHER, SECRET])
    new = both.encrypt("new", kind="reasoning", owner="ann")
    assert (opened(both, old), opened(both, new)) == ("old", "new")
    assert opened(Encryptor([OTHER]), new) == "new", "the first one seals"
    refused(Encryptor([SECRET]), new)
    refused(Encryptor([OTHER]), old)


@given(data=st.data(), text=st.text(max_size=12))
def test_a_payload_that_was_changed_in_any_byte_is_refused(data: st.DataObject, text: str) -> None:
    seal = Encryptor([SECRET])
    mark, key, encoded = seal.encrypt(text, kind="reasoning", owner="ann").split(".")
    payload = bytearray(base64.urlsafe_b64decode(encoded))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    refused(seal, f"{mark}.{key}.{base64.urlsafe_b64encode(payload).decode()}")
    refused(seal, f"{mark}.{key}.{base64.urlsafe_b64encode(payload[:place]).decode()}")


@given(data=st.data(), text=st.text(max_size=12))
def test_a_payload_that_was_changed_in_any_character_is_never_opened_to_another_text(
    data: st.DataObject, text: str
) -> None:
    seal = Encryptor([SECRET])
    sealed = seal.encrypt(text, kind="reasoning", owner="ann")
    place = data.draw(st.integers(0, len(sealed)))
    changed = data.draw(
        st.sampled_from(
            [
                sealed[:place] + data.draw(st.characters(exclude_categories=())) + sealed[place + 1 :],
                sealed[:place] + sealed[place + 1 :],
                sealed[:place] + data.draw(st.text(min_size=1, max_size=3)) + sealed[place:],
            ]
        )
    )
    try:
        came_out = opened(seal, changed)
    except errors.InvalidRequest:
        return
    # Base64 has several spellings of the same bytes; and what bears no mark of ours is another server's.
    assert came_out == text or (came_out is None and changed.partition(".")[0] != "rk1")


@pytest.mark.parametrize(
    "foreign", ["", "gAAAAABm…", "rk2.key.AAAA", "rk", "eyJhbGciOi.J9.x", "\ud83d", "RK1.x.y", " rk1.a.b"]
)
def test_what_no_kit_has_sealed_is_not_opened_and_not_refused(foreign: str) -> None:
    assert opened(Encryptor([SECRET]), foreign) is None


@pytest.mark.parametrize("rest", ["", ".", "..", "{key}", "{key}.", "{key}.A", "{key}.****", "{key}.\ud83d", "{key}.é"])
def test_what_bears_our_mark_and_is_no_payload_is_refused(rest: str) -> None:
    seal = Encryptor([SECRET])
    key = seal.encrypt("text", kind="reasoning", owner="ann").split(".")[1]
    for sealed in (f"rk1.{rest.format(key=key)}", f"rk1.{rest.format(key=key)}AAAA", f"rk1.0000.{rest}"):
        with pytest.raises(errors.InvalidRequest) as caught:
            opened(seal, sealed)
        assert caught.value.code == "invalid_encrypted_content"
    with pytest.raises(errors.InvalidRequest):
        opened(seal, "rk1")


@pytest.mark.parametrize("secrets", [["short"], [SECRET, "x" * 15], [""], SECRET, [b"x" * 32], [None], [7]])
def test_a_secret_is_a_text_that_is_hard_to_guess(secrets: Any) -> None:
    for make in (Encryptor, lambda secrets: ResponsesKit(ScriptedBackend(), secrets=secrets)):
        with pytest.raises(errors.ConfigurationError, match="secret") as caught:
            make(secrets)
        assert SECRET not in str(caught.value)


# Through the kit.

anyio_both = pytest.mark.anyio

THOUGHT = [outputs.Reasoning("The user "), outputs.Reasoning("greets."), "Hello."]
ASK: dict[str, Any] = {"input": "Hi", "include": ["reasoning.encrypted_content"], "store": False}


def kit_with(*scripts: Any, secrets: Any = (SECRET,), **settings: Any) -> tuple[ResponsesKit, ScriptedBackend]:
    backend = ScriptedBackend(*(scripts or (THOUGHT,)))
    return ResponsesKit(backend, secrets=secrets, **settings), backend


def carried(item: dict[str, Any]) -> dict[str, Any]:
    """A reasoning item as clients send it back that keep nothing on the server: sealed, and otherwise empty."""
    return {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}


def again(*items: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "Hi"}, *items, {"role": "user", "content": "And now?"}]}


@anyio_both
async def test_encrypted_content_comes_with_the_reasoning_item_where_it_was_asked_for() -> None:
    kit, _ = kit_with()
    response = await kit.create(ASK)
    check_response(response)
    assert response["output"][0]["encrypted_content"].startswith("rk1.")
    assert "encrypted_content" not in (await kit.create({"input": "Hi"}))["output"][0]


@anyio_both
@pytest.mark.parametrize("told", [True, False])
async def test_a_stream_shows_encrypted_content_when_the_item_is_done(told: bool) -> None:
    kit, _ = kit_with(stream_reasoning=told)
    async with kit.stream(ASK | {"stream": True}) as events:
        seen = [event async for event in events]
    response = check_stream(seen)
    added, done = [event["item"] for event in seen if event.get("output_index") == 0 and "item" in event]
    assert "encrypted_content" not in added
    assert done["encrypted_content"] == response["output"][0]["encrypted_content"]
    assert done["encrypted_content"].startswith("rk1.")


@anyio_both
@pytest.mark.parametrize("content", ["left out", [], None])
async def test_what_the_client_carried_reaches_the_model_opened(content: Any) -> None:
    kit, backend = kit_with()
    first = await kit.create(ASK, owner="ann")
    item = carried(first["output"][0]) | ({} if content == "left out" else {"content": content})
    second = await kit.create(again(item, {"role": "assistant", "content": "Hello."}) | {"store": False}, owner="ann")
    check_response(second)
    assert backend.turns[-1].items[1].text == "The user greets."
    assert backend.turns[-1].messages()[1]["reasoning_content"] == "The user greets."


@anyio_both
async def test_carried_reasoning_opens_in_another_process_with_the_same_secret() -> None:
    sealed = (await kit_with()[0].create(ASK, owner="ann"))["output"][0]
    kit, backend = kit_with(secrets=[OTHER, SECRET])
    await kit.create(again(carried(sealed)), owner="ann")
    assert backend.turns[-1].items[1].text == "The user greets."


@anyio_both
async def test_what_is_stored_stays_sealed_and_is_opened_again_when_the_conversation_goes_on() -> None:
    kit, backend = kit_with()
    sealed = carried((await kit.create(ASK, owner="ann"))["output"][0])
    second = await kit.create(again(sealed), owner="ann")
    kept = (await kit.input_items(second["id"], owner="ann", order="asc"))["data"][1]
    assert (kept["content"], kept["encrypted_content"]) == ([], sealed["encrypted_content"])
    await kit.create({"input": "More.", "previous_response_id": second["id"]}, owner="ann")
    assert backend.turns[-1].items[1].text == "The user greets."


@anyio_both
async def test_content_that_is_sent_along_is_taken_as_it_is() -> None:
    kit, backend = kit_with()
    item = (await kit.create(ASK, owner="ann"))["output"][0]
    item["content"] = [{"type": "reasoning_text", "text": "Mine."}]
    await kit.create(again(item), owner="ann")
    assert backend.turns[-1].items[1].text == "Mine."


@anyio_both
@pytest.mark.parametrize("foreign", ["gAAAAABm", "rk2.x.y", "…"])
async def test_reasoning_that_another_server_sealed_is_accepted_and_kept(foreign: str) -> None:
    kit, backend = kit_with()
    item = {"type": "reasoning", "summary": [], "encrypted_content": foreign}
    response = await kit.create(again(item))
    kept = (await kit.input_items(response["id"], order="asc"))["data"][1]
    assert kept["encrypted_content"] == foreign
    assert backend.turns[-1].items[1].text == ""
    assert [message["role"] for message in backend.turns[-1].messages()] == ["user", "user"]


@anyio_both
@pytest.mark.parametrize("fault", ["changed", "another's", "another secret's"])
async def test_reasoning_that_was_tampered_with_is_refused_with_its_place(fault: str) -> None:
    kit, backend = kit_with()
    item = carried((await kit.create(ASK, owner="ann"))["output"][0])
    owner = "bob" if fault == "another's" else "ann"
    if fault == "changed":
        sealed = item["encrypted_content"]
        place = len(sealed) // 2
        item["encrypted_content"] = sealed[:place] + ("A" if sealed[place] != "A" else "B") + sealed[place + 1 :]
    elif fault == "another secret's":
        kit, backend = kit_with(secrets=[OTHER])
    asked = len(backend.turns)
    with pytest.raises(errors.InvalidRequest) as caught:
        await kit.create(again({"role": "assistant", "content": "x"}, item), owner=owner)
    assert (caught.value.status, caught.value.code, caught.value.param) == (
        400,
        "invalid_encrypted_content",
        "input[2].encrypted_content",
    )
    assert len(backend.turns) == asked


@anyio_both
async def test_a_conversation_whose_secret_was_lost_is_refused_and_the_chain_named() -> None:
    kit, _ = kit_with()
    sealed = carried((await kit.create(ASK, owner="ann"))["output"][0])
    second = await kit.create(again(sealed), owner="ann")
    later = ResponsesKit(ScriptedBackend(THOUGHT), store=kit.store, secrets=[OTHER])
    with pytest.raises(errors.InvalidRequest) as caught:
        await later.create({"input": "More.", "previous_response_id": second["id"]}, owner="ann")
    assert (caught.value.code, caught.value.param) == ("invalid_encrypted_content", "previous_response_id")
