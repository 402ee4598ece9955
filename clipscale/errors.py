"""Exceptions whose message is all that the user sees."""

import signal

from clipscale.terminal import printable


class UserError(Exception):
    """A mistake in the settings, the data or the machine that the user can fix.

    The message is one line: the setting, its value, and the remedy. The command line prints it as `error: ...` without a traceback and
    exits with status 2. Control characters, such as newlines in the value, are escaped.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable(message))


class StoppedError(UserError):
    """A signal stopped the run after a whole step and a checkpoint. The command line exits with 128 + `number`, as for the signal."""

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.number = number
