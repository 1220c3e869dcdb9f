"""Signals that a scheduler or a person sends before the process has to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

# "Temporary failure, try again", of sysexits.h: no other exit of ours has it.
EXIT_CODE = 75


# `timeout` and schedulers signal a process and its group: within so long a signal
# counts once.
_REPEAT_SECONDS = 1.0
# All of them save. SIGHUP is a closed terminal, SIGUSR1 what SLURM sends if asked to.
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class Interrupted(Exception):  # noqa: N818 - It is no error.
    """The run was asked to end and did; the message says where it goes on from."""


class Interruption:
    """Notices signals at once, even while compiled code runs.

    Python runs a plain signal handler only between two of its own instructions, which
    can be a minute apart while XLA compiles or a large set is evaluated. So a thread
    waits for signals beside the main one. The first signal sets `received`, for the
    main thread to look at between two calls; where the main thread is in `may_leave`,
    the thread ends the process itself. A signal more than a second later ends the
    process at once. Signals that the process ignores, as under ``nohup``, stay ignored.

    Without entering it, as in a notebook, signals stay what they were.

    Attributes:
      received: The signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._leave: Callable[[], str] | None = None
        # Held while the thread leaves, and while what it leaves from changes.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """What to call the reason to stop."""
        return self.received.name if self.received else "another process"

    def __enter__(self) -> Self:
        """Begins to listen, in the main thread."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Without a handler of Python's, nothing would be written to the socket.
        numbers = (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name))
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in numbers
            if signal.getsignal(number) != signal.SIG_IGN
        }
        self._wakeup = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the signals back to whoever had them."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._writer.close()  # Which ends the thread.

    @contextlib.contextmanager
    def may_leave(self, leave: Callable[[], str]) -> Iterator[None]:
        """Lets a signal end the process at any moment of a block.

        Args:
          leave: What to do before; it returns what to say. It runs in another thread,
            so the block must not change what it uses.
        """
        with self._lock:
            self._leave = leave
        if self.received:  # It came just before, when there was nothing to call.
            self._end()
        try:
            yield
        finally:
            # Waits here, until the process is gone, if the thread is leaving.
            with self._lock:
                self._leave = None

    def _listen(self) -> None:
        first = 0.0
        while received := self._reader.recv(1):
            if received[0] not in self._handlers:
                continue
            if self.received is not None:
                if time.monotonic() - first < _REPEAT_SECONDS:
                    continue
                os._exit(128 + received[0])
            first = time.monotonic()
            self.received = signal.Signals(received[0])
            # Not under the lock of the main thread's own block: it would wait for
            # itself if leaving fails, and a second signal must be heard meanwhile.
            threading.Thread(target=self._end, daemon=True).start()
        self._reader.close()

    def _end(self) -> None:
        with self._lock:
            if self._leave is None:
                return
            try:
                text, code = self._leave(), EXIT_CODE
            except Exception as failure:
                text, code = str(failure), 1
            print(f"{self.name}: {text}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
