"""Keeps the store small; to be run now and then."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from responses_kit._concurrency import loop_thread
from responses_kit.engine.hooks import CompletionHook
from responses_kit.engine.repository import Repository
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import ResponseStore

from ...conf import Conf
from ...signals import announce


class Command(BaseCommand):
    """`manage.py responses_kit_prune`."""

    help = (
        "Removes the responses that have outlived their time from the store of the setting RESPONSES_KIT, and ends"
        " those whose worker is gone. To be run now and then."
    )
    requires_system_checks = []  # the backend need not be there, where only the store is to be cleared

    def add_arguments(self, parser: ArgumentParser) -> None:
        """As Django asks for it."""
        parser.add_argument(
            "--max-records", type=int, metavar="N", help="Most responses to keep; the least recently used ones go."
        )

    def handle(self, *, max_records: int | None = None, **options: Any) -> None:
        """As Django asks for it."""
        if max_records is not None and max_records < 0:
            raise CommandError("--max-records is a number of responses.")
        try:
            store = Conf().store(**({} if max_records is None else {"max_records": max_records}))
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if isinstance(store, MemoryStore):
            raise CommandError("The store is the memory of each web process, which bounds itself.")
        try:
            removed, ended = loop_thread.call(_pruned, store)
        except Exception as error:
            raise CommandError(f"The store failed: {error.__cause__ or error}") from error
        self.stdout.write(
            self.style.SUCCESS(f"{removed} responses removed, {ended} ended whose worker was gone."),
        )


async def _pruned(store: ResponseStore) -> tuple[int, int]:
    try:
        return await Repository(store, completion_hook=CompletionHook(announce)).prune()
    finally:
        if hasattr(store, "aclose"):
            await store.aclose()
