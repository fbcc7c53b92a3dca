"""Callbacks for termination signals, in addition to existing handlers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from .tasks import call_soon_threadsafe

__all__ = ["on_termination"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_termination(callback: Callable[[], Any]) -> Iterator[None]:
    """Call a function on the running event loop at each SIGTERM and SIGINT within the block.

    The previous handlers run afterwards. Outside the main thread, which alone handles signals, nothing is installed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    call_soon = call_soon_threadsafe()
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def handle(number: int, frame: FrameType | None) -> None:
        call_soon(callback)
        handler = previous[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in _SIGNALS:
            if signal.getsignal(number) is handle:
                signal.signal(number, previous[number] or signal.SIG_DFL)
