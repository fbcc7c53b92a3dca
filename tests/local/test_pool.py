from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from responses_kit import errors
from responses_kit.backends.local.inference.engine import Engine
from responses_kit.backends.local.inference.pool import EnginePool

from .conversation import tiny_model

TIMEOUT = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("pool")).path


@pytest.fixture
def engines(model: Path) -> list[Engine]:
    return [Engine(model, context_length=64, gpu_layers=0, threads=1) for _ in range(2)]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def never() -> bool:
    return False


class Waiter:
    """A request in the queue of a pool.

    Args:
        pool: The pool.
        threads: Run the request.
        then: Called with the engine.
    """

    def __init__(
        self, pool: EnginePool, threads: ThreadPoolExecutor, then: Callable[[Engine], None] = lambda engine: None
    ):
        self.is_waiting, self.is_cancelled = threading.Event(), threading.Event()
        self.result: Future[Engine | None] = threads.submit(self._wait, pool, then)
        assert self.is_waiting.wait(TIMEOUT)

    def _wait(self, pool: EnginePool, then: Callable[[Engine], None]) -> Engine | None:
        engine = pool.acquire([1], self._poll)
        if engine is not None:
            then(engine)
        return engine

    def _poll(self) -> bool:
        self.is_waiting.set()
        return self.is_cancelled.is_set()


def acquire(pool: EnginePool) -> Engine:
    engine = pool.acquire([1], never)
    assert engine is not None
    return engine


def test_pool_returns_engine_with_longest_prefix(engines: list[Engine]):
    first, second = engines
    first.evaluate([2, 3, 4])
    second.evaluate([2, 3, 5, 6])
    pool = EnginePool(engines, queue=0)
    assert pool.acquire([2, 3, 5, 6, 7], never) is second
    assert pool.acquire([2, 3, 5, 6, 7], never) is first


def test_short_shared_prefix_does_not_evict_long_conversation(engines: list[Engine]):
    first, second = engines
    first.evaluate([2, 3, 4, 5, 6, 7, 8])
    assert EnginePool(engines, queue=0).acquire([2, 3, 9], never) is first  # idle the longest
    pool = EnginePool([second, first], queue=0)
    assert pool.acquire([2, 3, 9], never) is second


def test_pool_returns_longest_idle_of_equal_engines(engines: list[Engine]):
    pool = EnginePool(engines, queue=0)
    first, second = acquire(pool), acquire(pool)
    pool.release(second)
    pool.release(first)
    assert acquire(pool) is second


def test_full_queue_is_refused_with_retry_after(engines: list[Engine], threads: ThreadPoolExecutor):
    pool = EnginePool(engines[:1], queue=2)
    engine = acquire(pool)
    waiters = [Waiter(pool, threads, pool.release) for _ in range(2)]
    with pytest.raises(errors.TooManyRequests) as caught:
        pool.acquire([1], never)
    assert caught.value.status == 429
    assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
    pool.release(engine)
    assert [waiter.result.result(TIMEOUT) for waiter in waiters] == [engine, engine]
    assert acquire(pool) is engine


def test_zero_queue_refuses_immediately(engines: list[Engine]):
    pool = EnginePool(engines[:1], queue=0)
    acquire(pool)
    with pytest.raises(errors.TooManyRequests):
        pool.acquire([1], never)


def test_queue_is_first_in_first_out(engines: list[Engine], threads: ThreadPoolExecutor):
    pool = EnginePool(engines[:1], queue=6)
    engine = acquire(pool)
    order: list[int] = []

    def served(number: int) -> Callable[[Engine], None]:
        def then(engine: Engine) -> None:
            order.append(number)
            pool.release(engine)

        return then

    waiters = [Waiter(pool, threads, served(number)) for number in range(6)]
    pool.release(engine)
    for waiter in waiters:
        waiter.result.result(TIMEOUT)
    assert order == list(range(6))


def test_cancelled_waiter_frees_queue_place(engines: list[Engine], threads: ThreadPoolExecutor):
    pool = EnginePool(engines[:1], queue=1)
    engine = acquire(pool)
    waiter = Waiter(pool, threads)
    waiter.is_cancelled.set()
    started = time.monotonic()
    assert waiter.result.result(TIMEOUT) is None
    assert time.monotonic() - started < 1
    after = Waiter(pool, threads, pool.release)
    pool.release(engine)
    assert after.result.result(TIMEOUT) is engine


def test_error_while_waiting_frees_queue_place(engines: list[Engine], threads: ThreadPoolExecutor):
    pool = EnginePool(engines[:1], queue=1)
    engine = acquire(pool)

    def broken() -> bool:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        pool.acquire([1], broken)
    pool.release(engine)
    assert acquire(pool) is engine


def test_close_refuses_waiters_and_frees_returned_engines(engines: list[Engine], threads: ThreadPoolExecutor):
    pool = EnginePool(engines, queue=1)
    engine = acquire(pool)
    acquire(pool)
    waiter = Waiter(pool, threads)
    pool.close()
    with pytest.raises(errors.ServerError, match="shutting down"):
        waiter.result.result(TIMEOUT)
    engine.evaluate([2])  # it still works
    pool.release(engine)
    with pytest.raises(ValueError, match="cannot evaluate"):
        engine.evaluate([2])
    with pytest.raises(errors.ServerError, match="shutting down"):
        pool.acquire([1], never)


def test_reservation_reserves_place(engines: list[Engine]):
    pool = EnginePool(engines[:1], queue=1)
    reservations = [pool.reserve(), pool.reserve()]
    with pytest.raises(errors.TooManyRequests):
        pool.reserve()
    with pytest.raises(errors.TooManyRequests):
        pool.acquire([1], never)
    assert pool.acquire([1], never, reservations[0]) is engines[0]


def test_later_round_always_gets_reservation(engines: list[Engine]):
    pool = EnginePool(engines[:1], queue=0)
    engine = acquire(pool)
    reservation = pool.reserve(force=True)
    with pytest.raises(errors.TooManyRequests):
        pool.reserve()
    pool.release(engine)
    assert pool.acquire([1], never, reservation) is engine


def test_dropped_reservation_frees_place(engines: list[Engine]):
    pool = EnginePool(engines[:1], queue=0)
    reservation = pool.reserve()
    with pytest.raises(errors.TooManyRequests):
        pool.reserve()
    del reservation
    pool.reserve()


def test_reservation_is_consumed_when_engine_is_acquired(engines: list[Engine]):
    pool = EnginePool(engines[:1], queue=1)
    pool.acquire([1], never, pool.reserve())
    reservation = pool.reserve()
    with pytest.raises(errors.TooManyRequests):
        pool.reserve()
    del reservation
