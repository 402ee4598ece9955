"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """A mistake in the settings, the data or the machine that the user can mend.

    The message is one line: the setting, its value, and the remedy. The command line prints it as `error: ...` without a traceback and
    exits with status 2.
    """
