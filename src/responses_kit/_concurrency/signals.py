"""The signals that end a process, heard beside whoever handles them."""

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
def on_termination(act: Callable[[], Any]) -> Iterator[None]:
    """Within the block, calls a function on the running event loop when SIGTERM or SIGINT comes, each time.

    What was there to handle the signal does so afterwards. Where signals can't be handled, in any thread but the main
    one, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    call_soon = call_soon_threadsafe()
    earlier = {number: signal.getsignal(number) for number in _SIGNALS}

    def heard(number: int, frame: FrameType | None) -> None:
        call_soon(act)
        handler = earlier[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _SIGNALS:
        signal.signal(number, heard)
    try:
        yield
    finally:
        for number in _SIGNALS:
            if signal.getsignal(number) is heard:
                signal.signal(number, earlier[number] or signal.SIG_DFL)
