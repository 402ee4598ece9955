"""Checks that there are credentials for a store of Amazon or Google, and says how to give them."""

import os

from clipscale.common.errors import UserError, one_line

# The exceptions that botocore and google-auth raise without credentials.
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
GOOGLE = ("gs", "gcs")
# How a user gives credentials.
GOOGLE_REMEDY = (
    "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=FILE; for public data "
    "FSSPEC_GS_TOKEN=anon"
)
AMAZON_REMEDY = "aws configure, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for public data FSSPEC_S3_ANON=true"


def check_credentials(scheme: str, subject: str) -> None:
    """Raise UserError for an address of Google's store if there are no credentials.

    gcsfs would try without them for minutes. This may ask the machine's metadata server, for seconds.
    """
    if scheme not in GOOGLE or "STORAGE_EMULATOR_HOST" in os.environ:
        return
    from fsspec import get_filesystem_class
    from fsspec.config import conf

    get_filesystem_class(scheme)  # raises ImportError if the scheme's library is not installed
    if any(name in conf.get(each, {}) for each in GOOGLE for name in ("token", "endpoint_url")):
        return
    from google import auth

    try:
        auth.default()
    except Exception as error:
        raise no_credentials(subject, error) from error


def no_credentials(subject: str, error: BaseException) -> UserError:
    """The UserError for an error of NO_CREDENTIALS."""
    reason = one_line(error).partition(". ")[0]
    remedy = GOOGLE_REMEDY if type(error).__name__ == "DefaultCredentialsError" else AMAZON_REMEDY
    return UserError(f"{subject} has no credentials ({reason}); {remedy}")
