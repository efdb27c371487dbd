"""Background: one thread that runs jobs in order, from a queue bounded in number and bytes. Torch-free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

Job = Callable[[], None]


class Background:
    """`offer` never waits. `chores` runs every `pause` seconds, also while the queue is never empty.

    A job that raises ends itself only: `failed` is told, the thread goes on.
    """

    def __init__(
        self,
        name: str,
        *,
        chores: Job,
        failed: Callable[[Exception], None],
        pause: float,
        max_jobs: int = 256,
        max_bytes: int = 512 * 2**20,
    ) -> None:
        self._chores, self._failed, self._pause = chores, failed, pause
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._jobs: deque[tuple[Job, int]] = deque()
        self._bytes = 0
        self._busy = True  # until the first chores are done
        self._closing = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, job: Job, size: int = 0) -> bool:
        """False when the queue is full or closing: the job will not run."""
        with self._changed:
            full = len(self._jobs) >= self._max_jobs or (self._jobs and self._bytes + size > self._max_bytes)
            if full or self._closing:
                return False
            self._jobs.append((job, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def settle(self, timeout: float) -> bool:
        """Wait until every job offered so far has run; False when that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout)

    @property
    def waiting(self) -> int:
        """Jobs not yet run."""
        return len(self._jobs)

    @property
    def bytes(self) -> int:
        """Bytes that waiting jobs hold."""
        return self._bytes

    def close(self, timeout: float) -> bool:
        """Run what waits, for at most `timeout` seconds, then end the thread; False when jobs were left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            left = len(self._jobs)
            self._jobs.clear()
            self._bytes = 0
        return left == 0 and not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing, max(0.0, due - time.monotonic()))
                if self._closing and not self._jobs:
                    return
                late = time.monotonic() >= due
                job, size = (self._chores, 0) if late or not self._jobs else self._jobs.popleft()
                self._bytes -= size
                self._busy = True
            try:
                job()
            except Exception as error:
                self._failed(error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
            if late:
                due = time.monotonic() + self._pause
