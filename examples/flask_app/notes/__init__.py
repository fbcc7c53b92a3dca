"""A small app for personal notes; `assistant` adds the Open Responses API."""

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
    app.after_request(add_security_headers)
    return app


def development_key(folder: Path) -> str:
    """Return a key that is stored in a folder, so that sessions survive restarts."""
    with tempfile.NamedTemporaryFile("w", dir=folder) as file:  # readable by this user only
        file.write(secrets.token_hex(32))
        file.flush()
        with suppress(FileExistsError):  # another process was first
            os.link(file.name, folder / "secret_key")
    return (folder / "secret_key").read_text()


def add_security_headers(response: Response) -> Response:
    response.headers.setdefault("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
    return response
