"""The database, with one connection per application context."""

import secrets
import sqlite3

import click
from flask import Flask, current_app, g
from werkzeug.security import generate_password_hash

NOTES = {
    "ann": [
        "The spare key is with Mrs. Weber on the second floor.",
        "Jasmine tea: 80 degrees, three minutes, then taste. Longer makes it bitter.",
        "Green tea from the market, the one in the tin with the crane, was the best so far this year.",
        "Dentist on the 14th at half past nine. Bring the insurance card.",
        "Tea cups for Dad's birthday: the blue ones with the thin rim, not the ones with the handle.",
        "The bicycle's rear light needs two AAA batteries, the front light charges by USB.",
        "Never again tea after eight in the evening.",
    ],
    "bob": ["The spare key is under the third flower pot.", "Coffee filters are size 4."],
}


def get_db() -> sqlite3.Connection:
    if "db" not in g:
        g.db = sqlite3.connect(current_app.config["DATABASE"])
        g.db.row_factory = sqlite3.Row
    db: sqlite3.Connection = g.db
    return db


def close_db(error: BaseException | None) -> None:
    if (db := g.pop("db", None)) is not None:
        db.close()


@click.command("seed")
def seed() -> None:
    """Create the tables and two users with notes; print their passwords and API keys."""
    from .auth import key_digest

    db = get_db()
    with current_app.open_resource("schema.sql", "rt") as schema:
        db.executescript(schema.read())
    for name, notes in NOTES.items():
        password, key = secrets.token_urlsafe(9), secrets.token_urlsafe(32)
        with db:
            user = db.execute(
                "INSERT OR IGNORE INTO user (name, password_hash, key_digest) VALUES (?, ?, ?) RETURNING id",
                (name, generate_password_hash(password), key_digest(key)),
            ).fetchone()
            if user is not None:
                rows = [(user["id"], f"-{5 * index} days", text) for index, text in enumerate(notes)]
                db.executemany("INSERT INTO note (user_id, written, text) VALUES (?, date('now', ?), ?)", rows)
                click.echo(f"{name}: password {password}, API key {key}")


def init_app(app: Flask) -> None:
    app.teardown_appcontext(close_db)
    app.cli.add_command(seed)
