"""Authentication: people log in to the pages, programs send an API key."""

# Flask-Login has no types.
# mypy: allow-untyped-decorators, allow-subclassing-any

import hashlib
import hmac
import re
import secrets

from flask import Blueprint, Flask, Request, abort, flash, redirect, render_template, request, session, url_for
from flask_login import LoginManager, UserMixin, login_required, login_user, logout_user
from werkzeug import Response
from werkzeug.security import check_password_hash, generate_password_hash

from .db import get_db

bp = Blueprint("auth", __name__)
login_manager = LoginManager()
login_manager.login_view = "auth.login"
login_manager.login_message = ""

DUMMY_HASH = generate_password_hash(secrets.token_hex())


class User(UserMixin):
    def __init__(self, id: int, name: str) -> None:  # noqa: A002  # Flask-Login's name
        self.id, self.name = id, name


@login_manager.user_loader
def load_user(user_id: str) -> User | None:
    row = get_db().execute("SELECT id, name FROM user WHERE id = ?", (user_id,)).fetchone()
    return User(**row) if row else None


@bp.get("/login")
def login() -> str:
    return render_template("login.html")


@bp.post("/login")
def check_login() -> str | Response:
    name, password = request.form["name"], request.form["password"]
    row = get_db().execute("SELECT id, name, password_hash FROM user WHERE name = ?", (name,)).fetchone()
    # Unknown names take as long as known ones, so that the duration does not reveal which names exist.
    if not check_password_hash(row["password_hash"] if row else DUMMY_HASH, password) or row is None:
        flash("Wrong name or password.")
        return render_template("login.html")
    session.clear()
    login_user(User(row["id"], row["name"]))
    return redirect(local_path(request.args.get("next", "")) or url_for("pages.index"))


@bp.post("/logout")
@login_required
def logout() -> Response:
    logout_user()
    session.clear()
    return redirect(url_for("auth.login"))


def local_path(target: str) -> str | None:
    """Return the target if it is a plain path; anything else could lead to another site."""
    return target if re.fullmatch(r"/(\w[\w/?=&-]*)?", target, re.ASCII) else None


# CSRF protection.


def csrf_token() -> str:
    token: str = session.setdefault("csrf_token", secrets.token_urlsafe())
    return token


def check_csrf_token() -> None:
    """Reject forms without the session's token.

    JSON needs no token, because browsers do not send it across sites without CORS. The API checks keys, not cookies.
    """
    if request.method == "POST" and request.mimetype != "application/json" and request.blueprint != "responses":
        token = request.form.get("csrf_token", "")
        if not hmac.compare_digest(token.encode(), csrf_token().encode()):
            abort(400, "This form has expired. Reload the page.")


# API keys.


def key_digest(key: str) -> str:
    """Return the stored form of a key; random keys need no slow digest."""
    return hashlib.sha256(key.encode()).hexdigest()


def user_of_key(request: Request) -> str | None:
    """Return the id of the user that a request's API key belongs to, or None."""
    authorization = request.authorization
    if authorization is None or authorization.type != "bearer" or not authorization.token:
        return None
    row = get_db().execute("SELECT id FROM user WHERE key_digest = ?", (key_digest(authorization.token),)).fetchone()
    return str(row["id"]) if row else None


def init_app(app: Flask) -> None:
    login_manager.init_app(app)
    app.before_request(check_csrf_token)
    app.jinja_env.globals["csrf_token"] = csrf_token
