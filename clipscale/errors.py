"""The exceptions whose message is all that a user needs to see."""

import signal


class UserError(Exception):
    """A mistake in the settings, the data or the machine that the user can mend.

    The message is one line: the setting, its value, and the remedy. The command line prints it as `error: ...` without a traceback and
    exits with status 2.
    """


class StoppedError(UserError):
    """The run was told to stop by a signal; it has ended its step and saved. The command line exits with 128 + `number`, as after it."""

    number: int = signal.SIGTERM
