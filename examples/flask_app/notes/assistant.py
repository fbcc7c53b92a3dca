"""Questions about one's notes, answered by a search in them: for people in a page, for programs under /v1."""

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

PAUSE = 0.02  # seconds from one word to the next, as if a model had to think of it
MOST = 3  # notes in one answer
ORDINARY = re.compile(
    "(a|about|again|all|also|am|an|and|any|anything|are|as|at|be|by|can|could|did|do|does|else|for|from|had|has|have|how|"
    "i|if|in|is|it|its|know|me|more|my|no|not|note|notes|of|on|or|other|please|say|should|so|tell|than|that|the|them|then|"
    "there|these|they|this|those|to|was|we|were|what|when|where|which|who|why|will|with|would|write|wrote|you|your)"
)


class NotesBackend(Backend):
    """Answers under /v1, in an application context of its own."""

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
    """Answers the page, within its request: `g` and `current_user` are there to the last word."""
    yield from answer(turn, current_user.id)


def answer(turn: Turn, user_id: int) -> Iterator[outputs.Output]:
    words = re.findall(r"\S+\s*", found(turn, user_id))
    for word in words:
        yield word
        time.sleep(PAUSE)
    yield outputs.Usage(input_tokens=len(turn.text.split()), output_tokens=len(words))


def found(turn: Turn, user_id: int) -> str:
    """What the notes say. A question such as "What else?" is about that of the question before."""
    messages = turn.messages()  # the whole conversation, which the kit has loaded
    asked = [terms_in(str(message["content"])) for message in messages if message["role"] == "user"]
    terms = next(filter(None, reversed(asked)), [])
    if not terms:
        return "Ask about something that is in your notes, such as a thing or a name."
    notes = search(terms, user_id)
    if more := not asked[-1]:
        told = "".join(str(message["content"]) for message in messages if message["role"] == "assistant")
        notes = [note for note in notes if sentence(note) not in told]
    if not notes:
        return "Your notes say no more about that." if more else "Your notes say nothing about that."
    return "\n\n".join(map(sentence, notes[:MOST]))


def sentence(note: sqlite3.Row) -> str:
    return f"On {note['written']} you wrote: “{note['text']}”"


def terms_in(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.lower()) if not ORDINARY.fullmatch(word)][:50]


def search(terms: list[str], user_id: int) -> list[sqlite3.Row]:
    """The user's notes with any of these words, first those that have more of them, or rarer ones."""
    query = (
        "SELECT note.written, note.text FROM note_words JOIN note ON note.id = note_words.rowid"
        " WHERE note_words MATCH ? AND note.user_id = ? ORDER BY note_words.rank"
    )
    return get_db().execute(query, (" OR ".join(f'"{term}"' for term in terms), user_id)).fetchall()
