"""A small app for personal notes, as you might have one, which was given the Open Responses API in `assistant`."""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from flask import Flask, Response

from . import assistant, auth, db, pages


def create_app() -> Flask:
    app = Flask(__name__)
    instance = Path(app.instance_path)
    instance.mkdir(exist_ok=True)
    app.config.from_mapping(DATABASE=str(instance / "notes.sqlite3"), SESSION_COOKIE_SAMESITE="Lax")
    app.config.from_prefixed_env()  # FLASK_SECRET_KEY, FLASK_DATABASE, FLASK_SESSION_COOKIE_SECURE=true
    if not app.secret_key:
        app.secret_key = development_key(instance)
    db.init_app(app)
    auth.init_app(app)
    assistant.responses.init_app(app)
    for module in (auth, pages, assistant):
        app.register_blueprint(module.bp)
    app.after_request(secure)
    return app


def development_key(folder: Path) -> str:
    """A key that is made once and kept in this folder, so that restarts log nobody out."""
    with tempfile.NamedTemporaryFile("w", dir=folder) as made:  # which nobody else may read
        made.write(secrets.token_hex(32))
        made.flush()
        with suppress(FileExistsError):  # the first process's counts
            os.link(made.name, folder / "secret_key")
    return (folder / "secret_key").read_text()


def secure(response: Response) -> Response:
    response.headers.setdefault("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
    return response
