"""The pages."""

# Flask-Login has no types.
# mypy: allow-untyped-decorators

from flask import Blueprint, flash, redirect, render_template, request, url_for
from flask_login import current_user, login_required
from werkzeug import Response

from .db import get_db

bp = Blueprint("pages", __name__)


@bp.get("/")
@login_required
def index() -> str:
    query = "SELECT written, text FROM note WHERE user_id = ? ORDER BY written DESC, id DESC"
    return render_template("notes.html", notes=get_db().execute(query, (current_user.id,)).fetchall())


@bp.post("/")
@login_required
def add() -> Response:
    text = request.form["text"].strip()
    if not 0 < len(text) <= 2000:
        flash("A note must have 1 to 2000 characters.")
    else:
        with get_db() as db:
            db.execute("INSERT INTO note (user_id, text) VALUES (?, ?)", (current_user.id, text))
    return redirect(url_for("pages.index"))


@bp.get("/ask")
@login_required
def ask() -> str:
    return render_template("ask.html")
