# SPDX-License-Identifier: MIT
"""Runs python -m flash_mla.info and .bench as commands: what stops them is one line at most, not a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, Callable, NoReturn, Optional

_BY_SIGNAL = 128  # a shell's exit code of a process that a signal ended, less the signal


class Unwritten(Exception):
    """Output that could not be written; `code` is the exit code."""

    def __init__(self, what: str, error: OSError):
        super().__init__(f"{what} cannot be written: {error.strerror}")
        self.code = _BY_SIGNAL + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 1


def say(text: str) -> None:
    """Writes a line to the standard output at once."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise Unwritten("standard output", error) from None


class File:
    """A file to write, or none if there is no path. Nothing is kept back, so that closing it writes nothing."""

    def __init__(self, option: str, path: Optional[str]):
        self._what, self._file = f"argument {option}: {path}", None if path is None else open(path, "wb", buffering=0)

    def __bool__(self) -> bool:
        return self._file is not None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, text: str) -> None:
        left = text.encode()
        while left and self._file is not None:
            try:
                left = left[self._file.write(left) :]
            except OSError as error:
                raise Unwritten(self._what, error) from None


def run(name: str, main: Callable[[], Any]) -> NoReturn:
    """Exits with the code that `main` returns, or with 1 and a line on standard error if output cannot be written. As with other
    commands, who closed the pipe is told nothing, and Ctrl-C ends with 130."""
    with contextlib.suppress(AttributeError):  # None, or not the interpreter's own
        getattr(sys.stdout, "reconfigure")(errors="replace")
    try:
        code = _code_of(main)
    except KeyboardInterrupt:
        code = _BY_SIGNAL + signal.SIGINT
    except Unwritten as error:
        code = error.code
        if code == 1:
            with contextlib.suppress(OSError, AttributeError):
                sys.stderr.write(f"{name}: {error}\n")
    if code:
        _leave_nothing()
    sys.exit(code)


def _code_of(main: Callable[[], Any]) -> Any:
    try:
        code = main()
    except SystemExit as exit_:  # argparse has printed help or an error
        code = exit_.code
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        raise Unwritten("standard output", error) from None
    return code


def _leave_nothing() -> None:
    """The interpreter flushes the standard output when it ends, and would report that this fails."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
