"""The error of a shard, and a fault that costs no sample."""

# The fault of a shard that has changed since it was indexed, and is read without its index.
CHANGED_SHARD = "changed_shard"


class SourceError(Exception):
    """A shard cannot be read further. `reason` is a fixed word, under which its lost samples are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
