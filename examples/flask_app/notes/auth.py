"""Who asks: people log in to the pages, programs send an API key."""

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

NOBODYS_HASH = generate_password_hash(secrets.token_hex())


class User(UserMixin):
    def __init__(self, id: int, name: str) -> None:  # noqa: A002  # as Flask-Login names it
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
    # Hashed for unknown names, too, or the time would tell which names there are.
    if not check_password_hash(row["password_hash"] if row else NOBODYS_HASH, password) or row is None:
        flash("This name and password do not fit together. Try again.")
        return render_template("login.html")
    session.clear()
    login_user(User(row["id"], row["name"]))
    return redirect(own_path(request.args.get("next", "")) or url_for("pages.index"))


@bp.post("/logout")
@login_required
def logout() -> Response:
    logout_user()
    session.clear()
    return redirect(url_for("auth.login"))


def own_path(target: str) -> str | None:
    """The target, if it is plainly a path of this app: browsers take more than "https:" and "//" for other sites'."""
    return target if re.fullmatch(r"/(\w[\w/?=&-]*)?", target, re.ASCII) else None


# Forms of other sites' pages.


def csrf_token() -> str:
    token: str = session.setdefault("csrf_token", secrets.token_urlsafe())
    return token


def refuse_forged_forms() -> None:
    """Asks what is posted from pages for their token.

    JSON needs none: browsers send it to other sites only where those allow it. The API under its prefix looks at keys,
    not at cookies.
    """
    if request.method == "POST" and request.mimetype != "application/json" and request.blueprint != "responses":
        given = request.form.get("csrf_token", "")
        if not hmac.compare_digest(given.encode(), csrf_token().encode()):
            abort(400, "This page is too old. Load it again.")


# Keys of programs.


def digest_of(key: str) -> str:
    """All that is kept of a key. It is random and long, so a fast digest will do."""
    return hashlib.sha256(key.encode()).hexdigest()


def user_of_key(request: Request) -> str | None:
    """The user whose key an SDK sends. What the look-up's duration tells of a digest leads to no key."""
    given = request.authorization
    if given is None or given.type != "bearer" or not given.token:
        return None
    row = get_db().execute("SELECT id FROM user WHERE key_digest = ?", (digest_of(given.token),)).fetchone()
    return str(row["id"]) if row else None


def init_app(app: Flask) -> None:
    login_manager.init_app(app)
    app.before_request(refuse_forged_forms)
    app.jinja_env.globals["csrf_token"] = csrf_token
