"""Every error kvindex raises. The message is written for the person on call: what, where, what to do."""


class KVIndexError(Exception):
    """Base of all kvindex errors."""


class DecodeError(KVIndexError):
    """A peer sent bytes that are no message of the dialect. Marks that peer's stream, nothing else."""


class UnknownParent(KVIndexError):
    """A stored block names a parent that was never announced; fatal only where a snapshot can mend it."""


class CapacityExceeded(KVIndexError):
    """A stream went over one of its bounds (blocks, bytes, un-anchored blocks); the message names the bound."""


class ConfigurationError(KVIndexError):
    """The caller configured something impossible (bad endpoint, duplicate stream, too many streams)."""
