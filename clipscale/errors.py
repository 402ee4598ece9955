"""The exceptions whose message is all that a user needs to see."""


class UserError(Exception):
    """A mistake in the settings, the data or the machine that the user can mend.

    The message is one line: the setting, its value, and the remedy. The command line prints it as `error: ...` without a traceback and
    exits with status 2.
    """


class StoppedError(UserError):
    """The run was told to stop by SIGTERM; it has ended its step and saved. The command line exits with status 143, as after the signal."""
