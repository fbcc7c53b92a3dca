"""Answers to questions about notes, for the page and for programs under /v1."""

# Flask-Login has no types.
# mypy: allow-untyped-decorators

import re
import sqlite3
import time
from collections.abc import Iterator

from flask import Blueprint, Flask
from flask_login import current_user, login_required

from responses_kit import Backend, ResponsesKit, Turn, outputs
from responses_kit_flask import Responses

from .auth import user_of_key
from .db import get_db

WORD_DELAY = 0.02  # seconds between words, to simulate a model
MAX_NOTES = 3  # in one answer
STOP_WORDS = re.compile(
    "(a|about|again|all|also|am|an|and|any|anything|are|as|at|be|by|can|could|did|do|does|else|for|from|had|has|have|how|"
    "i|if|in|is|it|its|know|me|more|my|no|not|note|notes|of|on|or|other|please|say|should|so|tell|than|that|the|them|then|"
    "there|these|they|this|those|to|was|we|were|what|when|where|which|who|why|will|with|would|write|wrote|you|your)"
)


class NotesBackend(Backend):
    """The backend under /v1, which runs in an application context."""

    models = ["notes"]

    def generate(self, turn: Turn) -> Iterator[outputs.Output]:
        yield from answer(turn, int(turn.owner))


def make_kit(app: Flask) -> ResponsesKit:
    return ResponsesKit(NotesBackend(), owner=user_of_key)


bp = Blueprint("assistant", __name__)
responses = Responses(kit=make_kit, url_prefix="/v1")


@bp.post("/ask")
@login_required
@responses.endpoint(owner=lambda request: current_user.get_id(), models=["notes"])
def ask(turn: Turn) -> Iterator[outputs.Output]:
    """Answer the page; `g` and `current_user` work until the stream ends."""
    yield from answer(turn, current_user.id)


def answer(turn: Turn, user_id: int) -> Iterator[outputs.Output]:
    words = re.findall(r"\S+\s*", search_result(turn, user_id))
    for word in words:
        yield word
        time.sleep(WORD_DELAY)
    yield outputs.Usage(input_tokens=len(turn.text.split()), output_tokens=len(words))


def search_result(turn: Turn, user_id: int) -> str:
    """Return the notes that match the question.

    A question without search terms, such as "What else?", continues the previous one.
    """
    messages = turn.messages()  # the whole conversation
    questions = [search_terms(str(message["content"])) for message in messages if message["role"] == "user"]
    terms = next(filter(None, reversed(questions)), [])
    if not terms:
        return "Ask about something in your notes, such as a thing or a name."
    notes = search(terms, user_id)
    if is_follow_up := not questions[-1]:
        answers = "".join(str(message["content"]) for message in messages if message["role"] == "assistant")
        notes = [note for note in notes if quote(note) not in answers]
    if not notes:
        return "There is nothing more in your notes." if is_follow_up else "There is nothing about that in your notes."
    return "\n\n".join(map(quote, notes[:MAX_NOTES]))


def quote(note: sqlite3.Row) -> str:
    return f"On {note['written']} you wrote: “{note['text']}”"


def search_terms(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if not STOP_WORDS.fullmatch(word)][:50]


def search(terms: list[str], user_id: int) -> list[sqlite3.Row]:
    """Return the user's notes that contain any of the terms, best matches first."""
    query = (
        "SELECT note.written, note.text FROM note_words JOIN note ON note.id = note_words.rowid"
        " WHERE note_words MATCH ? AND note.user_id = ? ORDER BY note_words.rank"
    )
    return get_db().execute(query, (" OR ".join(f'"{term}"' for term in terms), user_id)).fetchall()
