"""Tests of the admin: list, search, transcripts, permissions, and stored content that is large, hostile or broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit.errors import ToolError
from responses_kit.outputs import (
    Annotation,
    Finish,
    Item,
    Reasoning,
    ReasoningSummary,
    Refusal,
    ToolCall,
    Usage,
)
from responses_kit.tools import HostedTool

from .databases import POSTGRES, configure, postgres

configure()

from django.contrib.auth.models import Permission, User  # noqa: E402  # Django's models come after its settings
from django.db import connections, transaction  # noqa: E402
from django.db.models import Model  # noqa: E402
from django.template.loader import render_to_string  # noqa: E402
from django.test import Client  # noqa: E402
from django.test.utils import (  # noqa: E402
    CaptureQueriesContext,
    override_settings,
    setup_test_environment,
    teardown_test_environment,
)

from responses_kit_django import admin  # noqa: E402
from responses_kit_django._admin import queries, transcript  # noqa: E402
from responses_kit_django._admin.transcript import Excerpt, build_turns, extract_preview  # noqa: E402
from responses_kit_django.models import Item as ItemRow  # noqa: E402
from responses_kit_django.models import Piece, Response  # noqa: E402

from .rows import create_conversation, create_row  # noqa: E402

LIST = "/admin/responses_kit_django/response/"


@pytest.fixture(scope="module", autouse=True)
def _answers_tell_their_context() -> Iterator[None]:
    setup_test_environment()
    yield
    teardown_test_environment()


class To:
    """A router that uses one database for all models."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: type[Model], **hints: Any) -> str:
        return self.alias

    db_for_write = db_for_read


@pytest.fixture(
    scope="module",
    params=["default", pytest.param("postgres", marks=pytest.mark.skipif(POSTGRES is None, reason="no PostgreSQL"))],
)
def tables(request: pytest.FixtureRequest) -> Iterator[str]:
    alias = request.param
    with postgres() if alias == "postgres" else nullcontext(), override_settings(DATABASE_ROUTERS=[To(alias)]):
        yield alias
    connections.close_all()


@pytest.fixture
def database(tables: str) -> Iterator[str]:
    """The alias of the database, which is rolled back after the test."""
    with transaction.atomic(using=tables):
        yield tables
        transaction.set_rollback(True, using=tables)


@pytest.fixture
def staff(database: str) -> Callable[..., Client]:
    """Return a function that logs a staff user with some permissions in, and returns the client."""

    def make(*permissions: str, superuser: bool = False) -> Client:
        user = User.objects.create_user("somebody", is_staff=True, is_superuser=superuser)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client = Client()
        client.force_login(user)
        return client

    return make


@pytest.fixture
def client(staff: Callable[..., Client]) -> Client:
    """The client of a superuser."""
    return staff(superuser=True)


class Page(HTMLParser):
    """A parsed page: its text and its tags."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if data.strip() and not {"script", "style"} & set(self.open[-1:]):
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def all(self, tag: str, name: str) -> list[str]:
        """Return the values of an attribute."""
        return [attributes[name] or "" for one, attributes in self.tags if one == tag and name in attributes]

    def within(self, first: str, last: str) -> str:
        """Return the text between two texts."""
        return self.text.partition(first)[2].partition(last)[0]


def page(client: Client, url: str, **query: str) -> Page:
    answer = client.get(url, query)
    assert answer.status_code == 200
    return Page(answer.content.decode())


def detail(row: Response) -> str:
    return f"{LIST}{row.pk}/change/"


def listed(client: Client, **query: str) -> set[str]:
    """Return the ids of the responses that the list shows."""
    answer = client.get(LIST, query)
    assert answer.status_code == 200
    return {row.response_id for row in answer.context["cl"].result_list}


def user_says(*texts: str) -> str:
    """Return the JSON of an input with one user message, as the kit stores it."""
    items = [
        {
            "type": "message",
            "id": "",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        for text in texts
    ]
    return json.dumps(items, separators=(",", ":"), ensure_ascii=False)


def assistant_says(text: str, **more: Any) -> str:
    """Return the JSON of a response with one message, as the kit stores it."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [{"type": "message", "id": "", "status": "completed", "role": "assistant", "content": content}]
    return json.dumps({"status": "completed", "output": output, **more})


# The list.


def test_list_shows_responses_with_last_user_text(client: Client) -> None:
    create_conversation(
        {"input": [{"role": "user", "content": "First"}, {"role": "user", "content": "What is\nthe   time?"}]},
        script=[["Noon.", Usage(1234, 56)]],
    )
    shown = page(client, LIST).text
    for stored_text in ("What is the time?", "ann", "scripted", "completed", "1,234 in, 56 out"):
        assert stored_text in shown
    assert "First" not in shown


def test_list_query_count_is_independent_of_rows(client: Client, database: str) -> None:
    counts = []
    for number in (1, 2, 30):
        for index in range(number):
            create_row(None, f"resp_{number}_{index}", input=user_says("Hi"))
        with CaptureQueriesContext(connections[database]) as asked:
            page(client, LIST)
        counts.append(len(asked))
    assert len(set(counts)) == 1, counts


def test_list_loads_only_ends_of_inputs(client: Client) -> None:
    create_row(input=user_says("x" * 1_000_000), response=assistant_says("y" * 1_000_000))
    answer = client.get(LIST)
    (row,) = answer.context["cl"].result_list
    assert {"input", "response", "request", "head", "names"} <= row.get_deferred_fields()
    assert len(answer.content) < 100_000
    assert "xxx" in answer.content.decode()


def test_list_count_is_bounded(client: Client, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_MAX_LISTED", 60)
    for index in range(60):
        create_row(None, f"resp_{index}")
    assert "There are more than" not in page(client, LIST).text
    create_row(None, "resp_60")
    shown = page(client, LIST)
    assert "There are more than 60 responses." in shown.text
    assert "?p=2" in shown.all("a", "href")
    assert "?p=3" not in shown.all("a", "href")
    assert client.get(LIST, {"p": "3"}).status_code == 302  # redirects to the first page
    with CaptureQueriesContext(connections[database]) as asked:
        page(client, LIST)
    counting = [query["sql"] for query in asked if "COUNT(*)" in query["sql"]]
    assert counting
    assert all("LIMIT 61" in sql for sql in counting)


LONG = "z" * 5_000


@pytest.mark.parametrize(
    ("stored_text", "expected"),
    [
        ("[]", ""),
        ("", ""),
        ("{", ""),
        ("[" * 1_000, ""),
        ('["user", 1, null, {"role": "user"}, {"role": "user", "content": [1, {"text": 2}]}]', ""),
        ('[{"role": "user", "content": "plain"}]', "plain"),
        (user_says("one", "two"), "two"),
        (user_says("a" * 500), "a" * 119 + "…"),
        (user_says("a\u202eb\u0000"), "a⟨U+202E⟩b⟨U+0000⟩"),
        (user_says("first", LONG, "last"), "last"),
        (user_says("beginning " + LONG), ("beginning " + LONG)[:119] + "…"),
        (user_says("broken behind") + LONG, "broken behind"),
        ("]" * 10_000, ""),
        ('{"type":"message"' * 1_000, ""),
    ],
)
def test_preview_is_last_user_text(stored_text: str, expected: str) -> None:
    size = queries._PREVIEW_LENGTH
    assert extract_preview(stored_text[:size], stored_text[-size:], len(stored_text)) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"status": "failed"}, {"resp_b"}),
        ({"status": "anything else"}, {"resp_a", "resp_b"}),
        ({"model": "parrot"}, {"resp_a"}),
        ({"model": "gone"}, set()),
        ({"background__exact": "1"}, {"resp_b"}),
        ({"created__gte": "2000-01-01 00:00:00+00:00"}, {"resp_a", "resp_b"}),
        ({"created__lt": "2000-01-01 00:00:00+00:00"}, set()),
    ],
)
def test_list_can_be_filtered(client: Client, query: dict[str, str], expected: set[str]) -> None:
    create_row(None, "resp_a", model="parrot")
    create_row(None, "resp_b", model="raven", status="failed", background=True)
    assert listed(client, **query) == expected
    filters = page(client, LIST).all("a", "href")
    assert {"?status=failed", "?model=parrot", "?background__exact=1"} <= set(filters)


@pytest.mark.parametrize("value", ["\x00", "a" * 5_000, "'\";--", "\ud7ff"])
def test_invalid_filter_value_is_handled(client: Client, value: str) -> None:
    create_row()
    for name in ("model", "status", "background__exact", "q"):
        assert client.get(LIST, {name: value}).status_code in (200, 302)


ODD_OWNER = "Jürgen <b>\u202e 100%"


@pytest.fixture
def found(client: Client) -> Any:
    create_row(
        None,
        "resp_a",
        input=user_says("Wie heißt die Straße in Kyōto? 😀"),
        response=assistant_says("Die „Größte“ 50%"),
    )
    create_row(None, "resp_b", owner=ODD_OWNER, input=json.dumps([{"role": "user", "content": "Größer als Kyōto 😀"}]))
    create_row(None, "resp_c", owner="carol", input=user_says('say "x" \\ y'), response=assistant_says("ann resp_a"))
    return lambda terms: listed(client, q=terms)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ("resp_a", {"resp_a"}),
        (" resp_a ", {"resp_a"}),
        ("resp_", {"resp_c"}),  # parts of ids are searched as words
        ("carol", {"resp_c"}),
        ("caro", set()),
        ("ann", {"resp_a"}),
        (ODD_OWNER, {"resp_b"}),
        ("'ann resp_a'", {"resp_c"}),
        ("ky\u014dto", {"resp_a", "resp_b"}),
        ("KYŌTO", {"resp_a", "resp_b"}),
        ("größ", {"resp_a", "resp_b"}),
        ("Größ kyōto", {"resp_a", "resp_b"}),
        ("Größ Straße", {"resp_a"}),
        ('"als Kyōto"', {"resp_b"}),
        ("😀", {"resp_a", "resp_b"}),
        ("50%", {"resp_a"}),
        ("5_%", set()),
        ("%", {"resp_a"}),
        ("\\", {"resp_c"}),
        ('"say \\"x\\""', {"resp_c"}),
        ("nowhere", set()),
        ('"', {"resp_c"}),
    ],
)
def test_search_matches_ids_owners_and_words(found: Any, terms: str, expected: set[str]) -> None:
    assert found(terms) == expected


def test_search_words_are_bounded(found: Any) -> None:
    assert found("Kyōto " * 1_000) == {"resp_a", "resp_b"}


def test_search_reads_newest_filtered_responses(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_SEARCHED_RESPONSES", 3)
    now = datetime.now(UTC)
    for number in range(10):
        create_row(
            None, f"resp_{number}", model=f"m{number % 2}", input=user_says("Hi"), created=now + timedelta(number)
        )
    assert listed(client, q="hi") == {"resp_7", "resp_8", "resp_9"}
    assert listed(client, q="hi", model="m0") == {"resp_4", "resp_6", "resp_8"}
    assert listed(client, q="resp_0") == {"resp_0"}


# Permissions.


def test_add_and_change_are_disabled(client: Client) -> None:
    row = create_row(input=user_says("Hi"))
    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(f"{LIST}add/", {"response_id": "x"}).status_code == 403
    assert client.post(detail(row), {"response_id": "x", "_save": "Save"}).status_code == 403
    assert client.post(detail(row), {"_saveasnew": "1"}).status_code == 403
    assert client.post(LIST, {"_save": "Save", "form-0-id": row.pk, "form-0-model": "x"}).status_code == 200
    shown = page(client, detail(row))
    assert shown.all("form", "id") == ["logout-form"]
    assert [kind for kind, _ in shown.tags if kind in ("textarea", "select")] == []
    assert f"{LIST}add/" not in [*shown.all("a", "href"), *page(client, "/admin/").all("a", "href")]
    kept = Response.objects.get()
    assert (kept.response_id, kept.model, kept.input) == ("resp_one", "scripted", row.input)


def test_user_without_permission_sees_nothing(staff: Callable[..., Client]) -> None:
    row = create_row(input=user_says("Hi"))
    client = staff("delete_response")
    for url in (LIST, detail(row)):
        assert client.get(url).status_code == 403
    assert client.get(f"{LIST}{row.pk}/history/").status_code == 403
    assert "login" in Client().get(detail(row)).headers["Location"]


def test_view_permission_offers_no_deletion(staff: Callable[..., Client]) -> None:
    row = create_row(input=user_says("Hi"))
    client = staff("view_response")
    shown = page(client, detail(row))
    assert "Hi" in shown.text
    assert f"{LIST}{row.pk}/delete/" not in shown.all("a", "href")
    assert page(client, LIST).all("select", "name") == []
    for url, data in ((f"{LIST}{row.pk}/delete/", {"post": "yes"}), (detail(row), {})):
        assert client.post(url, data).status_code == 403
    client.post(LIST, {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes"})
    assert Response.objects.filter(pk=row.pk).exists()


def test_delete_permission_deletes_response_with_related_rows(staff: Callable[..., Client]) -> None:
    first, second = create_conversation({"input": "One"}, {"input": "Two"})
    for row in (first, second):
        ItemRow.objects.create(response=row, owner="ann", item_id="msg_1")
        Piece.objects.create(response=row, start=0, count=1, data=b"data: 1\n\n")
    client = staff("view_response", "delete_response")
    shown = page(client, detail(first))
    assert f"{LIST}{first.pk}/delete/" in shown.all("a", "href")
    asked = page(client, f"{LIST}{first.pk}/delete/").text
    for stored_text in (first.response_id, "Responses: 1", "Items: 1", "Pieces: 1"):
        assert stored_text in asked
    assert client.post(f"{LIST}{first.pk}/delete/", {"post": "yes"}).status_code == 302
    assert [row.pk for row in Response.objects.all()] == [second.pk]
    assert [row.response_id for row in ItemRow.objects.all()] == [second.pk]
    assert [row.response_id for row in Piece.objects.all()] == [second.pk]
    assert (
        f"It continues {first.response_id}, which has been deleted or has expired." in page(client, detail(second)).text
    )


def test_bulk_deletion_is_bounded(staff: Callable[..., Client], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [create_row(None, f"resp_{index}") for index in range(4)]
    client = staff("view_response", "delete_response")
    monkeypatch.setattr(admin, "_MAX_DELETED", 3)
    chosen = {"action": "delete_selected", "_selected_action": [row.pk for row in rows], "post": "yes"}
    assert "more than 3 responses at a time" in client.post(LIST, chosen).content.decode()
    assert Response.objects.count() == 4
    client.post(LIST, {**chosen, "_selected_action": [row.pk for row in rows[1:]]})
    assert [row.pk for row in Response.objects.all()] == [rows[0].pk]


# Transcripts.


def the_weather(city: str) -> str:
    if city == "Atlantis":
        raise ToolError("No such city.")
    return f"Sunny in {city}"


WEATHER = HostedTool.from_function("acme:weather", the_weather)
CLOCK = {"type": "function", "name": "get_time", "parameters": {"type": "object"}}
PICTURE = "data:image/png;base64," + "iVBORw0KGgo" * 300


@pytest.fixture
def conversation() -> list[Response]:
    parts = [
        {"type": "input_text", "text": "What time is it, and what is this?"},
        {"type": "input_image", "image_url": PICTURE},
        {"type": "input_image", "image_url": "https://example.org/cat.png"},
        {"type": "input_file", "filename": "report.pdf", "file_data": "data:application/pdf;base64,AAAA"},
    ]
    return create_conversation(
        {
            "input": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}],
            "tools": [CLOCK],
            "instructions": "Answer shortly.",
            "metadata": {"ticket": "4711"},
        },
        {"input": [{"type": "function_call_output", "call_id": "call_1", "output": '{"time":"18:04"}'}]},
        {"input": "And the weather?", "tools": [{"type": "acme:weather"}]},
        {"input": "Show a chart"},
        {"input": "Go on"},
        {"input": "Something bad"},
        {"input": "Fail"},
        script=[
            [
                Reasoning("The clock knows."),
                ReasoningSummary("Asks the clock."),
                ToolCall("get_time", '{"zone":"Asia/Tokyo"}', "call_1"),
                Usage(1812, 40, 1100, 20),
            ],
            ["It is 18:04.", Annotation("https://time.example/now", "The time")],
            [ToolCall("the_weather", '{"city":"Atlantis"}')],
            ["It is under water."],
            [Item("acme:chart", {"kind": "bars", "values": [1, 2]})],
            ["One, two, ", Finish("max_output_tokens")],
            [Refusal("I would rather not.")],
            [RuntimeError("boom")],
        ],
        tools=[WEATHER],
    )


def test_conversation_is_shown_in_order(client: Client, conversation: list[Response]) -> None:
    shown = page(client, detail(conversation[-1])).text
    at = -1
    for stored_text in (
        "About this response",
        "failed",
        "scripted",
        "ann",
        "Turn 1",
        "1,812 input tokens, 40 output tokens (1,100 cached, 20 of reasoning)",
        "Answer shortly.",
        "get_time",
        "ticket",
        "4711",
        "Developer",
        "Be kind.",
        "User",
        "What time is it, and what is this?",
        "Image, image/png, 2.4",
        "Image: https://example.org/cat.png",
        "File report.pdf, application/pdf, 3",
        "Reasoning",
        "Asks the clock.",
        "The clock knows.",
        "Call of get_time",
        "call_1",
        '"zone": "Asia/Tokyo"',
        "Turn 2",
        "Output of get_time",
        '"time": "18:04"',
        "It is 18:04.",
        "Source: The time https://time.example/now",
        "Turn 3",
        "acme:weather",
        "And the weather?",
        "Hosted tool the_weather",
        "acme:weather",
        "failed",
        "Arguments",
        '"city": "Atlantis"',
        "Output",
        "No such city.",
        "It is under water.",
        "Turn 4",
        "acme:chart",
        '"kind": "bars"',
        "Turn 5",
        "incomplete",
        "Incomplete: max_output_tokens",
        "One, two,",
        "Turn 6",
        "Refusal",
        "I would rather not.",
        "Turn 7",
        "this response",
        "Error: model_error: ",
        "Fail",
        "Stored data",
        '"role": "user"',
        '"object": "response"',
    ):
        found = shown.find(stored_text, at + 1)
        assert found > at, f"{stored_text!r} is missing, or comes too early"
        at = found


def test_reasoning_and_raw_json_are_collapsed(client: Client, conversation: list[Response]) -> None:
    shown = page(client, detail(conversation[0]))
    kinds = [attributes.get("class") for tag, attributes in shown.tags if tag == "details"]
    assert kinds.count("rk-entry rk-reasoning") == 1
    assert kinds.count("rk-request") == 3
    assert shown.all("details", "open") == []


def test_response_links_to_previous_and_next(client: Client, conversation: list[Response]) -> None:
    first, second, third = conversation[:3]
    twin = create_row(first.conversation, "resp_twin", previous=second.response_id)
    other = create_conversation({"input": "Hi"}, owner="bob")[0]
    create_row(other.conversation, "resp_other", previous=second.response_id)
    shown = page(client, detail(second))
    rel = {(attributes.get("rel"), attributes.get("href")) for tag, attributes in shown.tags if tag == "a"}
    assert ("prev", detail(first)) in rel
    assert {href for kind, href in rel if kind == "next"} == {detail(third), detail(twin)}
    assert "Turn 3" not in shown.text
    assert "and more" not in shown.text


def test_continuations_listed_are_the_newest(client: Client) -> None:
    (row,) = create_conversation({"input": "Hi"})
    for index in range(25):
        create_row(row.conversation, f"resp_{index}", previous=row.response_id)
    shown = page(client, detail(row))
    assert shown.all("a", "rel").count("next") == 20
    assert "resp_24" in shown.text
    assert "and more" in shown.text


def a_long_conversation(length: int) -> list[Response]:
    rows: list[Response] = []
    for number in range(1, length + 1):
        rows.append(
            create_row(
                rows[0].conversation if rows else None,
                f"resp_{number}",
                previous=f"resp_{number - 1}" if rows else None,
                input=user_says(f"question {number}."),
                response=assistant_says(f"answer {number}."),
            )
        )
    return rows


def test_long_conversation_shows_newest_turns(client: Client) -> None:
    rows = a_long_conversation(120)
    shown = page(client, detail(rows[-1]))
    assert "70 earlier responses are not shown." in shown.text
    assert detail(rows[69]) in shown.all("a", "href")
    assert "question 70." not in shown.text
    assert "Turn 71\n" in shown.text
    for number in range(71, 121):
        assert f"question {number}.\n" in shown.text
        assert f"answer {number}.\n" in shown.text
    assert "20 earlier responses are not shown." in page(client, detail(rows[69])).text


def test_page_query_count_is_independent_of_turns(client: Client, database: str) -> None:
    rows = a_long_conversation(60)
    counts = []
    for row in (rows[0], rows[1], rows[59]):
        page(client, detail(row))  # fills Django's caches, such as that of content types
        with CaptureQueriesContext(connections[database]) as asked:
            page(client, detail(row))
        counts.append(len(asked))
    assert len(set(counts)) == 1, counts


def test_circular_chain_is_bounded(client: Client) -> None:
    one = create_row(None, "resp_1", previous="resp_2", input=user_says("one."))
    two = create_row(one.conversation, "resp_2", previous="resp_1", input=user_says("two."))
    shown = page(client, detail(two)).text
    assert shown.index("one.") < shown.index("two.")


def test_same_id_of_other_owner_is_separate(client: Client) -> None:
    create_row(None, "resp_1", owner="bob", input=user_says("bob's."))
    mine = create_row(None, "resp_2", owner="ann", previous="resp_1", input=user_says("ann's."))
    shown = page(client, detail(mine)).text
    assert "bob" not in shown
    assert "It continues resp_1, which has been deleted or has expired." in shown


def test_narrowed_queryset_applies_to_all_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = admin.ResponseAdmin.get_queryset
    monkeypatch.setattr(
        admin.ResponseAdmin, "get_queryset", lambda self, request: whole(self, request).exclude(response_id="resp_1")
    )
    rows = a_long_conversation(3)
    assert listed(client) == {"resp_2", "resp_3"}
    assert client.get(detail(rows[0])).status_code == 302
    shown = page(client, detail(rows[2])).text
    assert "question 2." in shown
    assert "question 1." not in shown


# Large content.


def test_long_texts_are_marked_as_truncated(client: Client) -> None:
    row = create_row(input=user_says("a" * 25_000), response=assistant_says("b" * 10_000))
    shown = page(client, detail(row)).text
    assert "a" * 10_000 in shown
    assert "a" * 10_001 not in shown
    assert "15,000 more characters are not shown." in shown
    assert "b" * 10_000 in shown
    assert shown.count("not shown") == 1


def test_every_page_is_bounded(client: Client) -> None:
    rows = []
    for number in range(1, 41):
        items = [json.loads(user_says("c" * 9_000))[0] for _ in range(130)]
        rows.append(
            create_row(
                rows[0].conversation if rows else None,
                f"resp_{number}",
                previous=f"resp_{number - 1}" if rows else None,
                input=json.dumps(items),
                response=assistant_says(f"answer {number}."),
            )
        )
    answer = client.get(detail(rows[-1]))
    assert len(answer.content) < 6_000_000
    shown = Page(answer.content.decode()).text
    assert "30 earlier items are not shown" in shown
    assert "9,000 more characters are not shown." in shown
    newest, oldest = shown.partition("Turn 40\n")[2].partition("Stored data")[0], shown.partition("Turn 2\n")[0]
    assert "answer 40." in newest
    assert "answer 1." not in oldest


def test_oversize_response_shows_its_start(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "_MAX_READ_BYTES", 30_000)
    monkeypatch.setattr(queries, "_EXCERPT_LENGTH", 5_000)
    first = create_row(None, "resp_1", input=user_says("before", "d" * 20_000), response=assistant_says("old answer"))
    second = create_row(
        first.conversation,
        "resp_2",
        previous="resp_1",
        input=user_says("e" * 20_000),
        response=assistant_says("new answer"),
    )
    shown = page(client, detail(second))
    old, new = shown.within("Turn 1\n", "Turn 2\n"), shown.within("Turn 2\n", "Stored data")
    for stored_text in ("The input is long: only the first 5,000 of its 20,", "before", "ddd", "old answer"):
        assert stored_text in old
    for stored_text in ("eee", "new answer"):
        assert stored_text in new
    assert "only the first" not in new


def test_embedded_image_does_not_hide_raw_json(client: Client) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]},
        {"role": "user", "content": "after"},
    ]
    shown = page(client, detail(create_row(input=json.dumps(items))))
    stored = shown.within("Stored data", "Close")
    assert f"(+{len(PICTURE) - 2_000})" in stored
    assert "after" in stored


# Hostile and broken content.

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=alert(1)>",
    "</pre></div><style>*{display:none}</style>",
    '"><a href="javascript:alert(1)">x</a>',
    "{{ request }}{% debug %}",
    "javascript:alert(1)",
    "data:text/html,<script>alert(1)</script>",
)


def hostile_rows() -> list[Response]:
    rows: list[Response] = []
    for number, text in enumerate(HOSTILE):
        message = {
            "type": "message",
            "role": "user",
            "status": text,
            "content": [
                {"type": "input_text", "text": text},
                {"type": "input_image", "image_url": text},
                {"type": "input_video", "video_url": text},
                {"type": "input_file", "filename": text, "file_url": text},
                {"type": text, "anything": text},
            ],
        }
        items = [
            message,
            {**message, "role": text},
            {"type": "function_call", "name": text, "call_id": text, "arguments": text},
            {"type": "function_call_output", "call_id": text, "output": text},
            {"type": "acme:tool", "name": text, "arguments": text, "output": text, "call_id": text},
            {"type": text, text: text},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
            {"type": "item_reference", "id": text},
            text,
        ]
        cited = {"type": "url_citation", "url": text, "title": text}
        said = {"type": "output_text", "text": text, "annotations": [cited]}
        response = {
            "output": [
                {"type": "message", "role": "assistant", "content": [said, {"type": "refusal", "refusal": text}]}
            ],
            "error": {"code": text, "message": text},
            "incomplete_details": {"reason": text},
            "instructions": text,
            "tools": [{"type": "function", "name": text}, {"type": text}],
            "metadata": {text: text},
            "usage": {"input_tokens_details": {"cached_tokens": text}},
        }
        rows.append(
            create_row(
                rows[0].conversation if rows else None,
                f"resp_{number}",
                owner=text,
                previous=f"resp_{number - 1}" if rows else None,
                input=json.dumps(items),
                response=json.dumps(response),
                model=text,
                status=text[:20],
                key=text,
            )
        )
    return rows


def test_stored_text_is_escaped(client: Client) -> None:
    rows = hostile_rows()
    quiet = create_row(None, "resp_quiet", owner="bob", input=user_says("Hi"), response=assistant_says("Hello"))
    plain = {"list": page(client, LIST), "detail": page(client, detail(quiet))}
    for name, url in (("list", LIST), ("detail", detail(rows[-1]))):
        shown = page(client, url)
        # The page has no elements that load, run or draw anything beyond those of the admin itself.
        for tag in ("script", "style", "img", "svg", "iframe", "object", "form", "link", "base"):
            assert [one for one in shown.tags if one[0] == tag] == [one for one in plain[name].tags if one[0] == tag]
        for _, attributes in shown.tags:
            assert not [attribute for attribute in attributes if attribute.startswith("on") or attribute == "style"]
        for href in shown.all("a", "href"):
            assert href.startswith(("/", "#", "?")), href
        for text in HOSTILE:
            assert " ".join(text.split()) in shown.text


def test_deceptive_characters_are_named(client: Client) -> None:
    text = "safe\u202etxt.exe\u2066\u0007\x00\ufeff\U000e0041 مرحبا 👩‍👩‍👧"
    row = create_row(input=user_says(text), response=assistant_says(text), owner=text)
    for url in (LIST, detail(row)):
        content = client.get(url).content.decode()
        for character in "\u202e\u2066\u0007\x00\ufeff\U000e0041":
            assert character not in content
        assert "safe⟨U+202E⟩txt.exe⟨U+2066⟩⟨U+0007⟩⟨U+0000⟩⟨U+FEFF⟩⟨U+E0041⟩ مرحبا 👩‍👩‍👧" in content


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "nonsense",
        "[",
        '{"output": [',
        "[" * 100_000,
        "[" * 5_000 + "]" * 5_000,
        '["\\ud800"]',
        '{"output": "\\udc00"}',
        "1" * 5_000,
        "1",
        "null",
        '"text"',
    ],
)
def test_broken_json_is_reported(client: Client, stored: str) -> None:
    row = create_row(input=stored, response=stored)
    shown = page(client, detail(row)).text
    for label in ("The input", "The response"):
        assert f"{label} is not valid JSON." in shown or f"{label} has an unknown format." in shown
    assert listed(client) == {"resp_one"}
    # Responses that continue it are readable.
    after = create_row(row.conversation, "resp_two", previous="resp_one", input=user_says("still here"))
    assert "still here" in page(client, detail(after)).text


NAMES = """
    type role content text name arguments output call_id id status summary encrypted_content image_url file_data
    filename annotations url title refusal phase code message reason metadata tools instructions error usage
    incomplete_details input_tokens_details cached_tokens
"""
WORDS = """
    message reasoning function_call function_call_output compaction item_reference acme:tool user assistant
    input_text output_text input_image input_file refusal data:,x
"""
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=9)
    | st.sampled_from(WORDS.split()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=8),
    max_leaves=25,
)


@given(VALUES, VALUES, st.integers(0, 400))
def test_any_stored_json_is_shown(given_items: Any, made: Any, cut: int) -> None:
    stored_text, response = (
        json.dumps([given_items, given_items]),
        json.dumps({"output": [made], **(made if isinstance(made, dict) else {})}),
    )
    row = Response(pk=1, input_tokens=1, output_tokens=2)
    for size in (0, cut):
        excerpt = Excerpt(row, stored_text[: -size or None], len(stored_text), response[: -size or None], len(response))
        (turn,) = build_turns([excerpt])
        for item in (*turn.input, *turn.output):
            render_to_string("admin/responses_kit_django/response/item.html", {"item": item}).encode()
        transcript.format_stored(excerpt.response, excerpt.response_size)
    extract_preview(stored_text[:cut], stored_text[-cut:], len(stored_text))


# Accessibility.


def test_page_has_ordered_headings_and_labels(client: Client, conversation: list[Response]) -> None:
    shown = page(client, detail(conversation[-1]))
    levels = [int(tag[1]) for tag, _ in shown.tags if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit()]
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels)), levels
    ids = [attributes["id"] for _, attributes in shown.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(shown.all("section", "aria-labelledby")) <= set(ids)
    assert {href[1:] for href in shown.all("a", "href") if href.startswith("#")} <= set(ids)
