"""The two ways in which a command fails on purpose; each message is one sentence that says what to do."""


class Refusal(Exception):
    """A finding or refusal: exit code 1."""


class Unusable(Exception):
    """Bad usage, or input that is missing or cannot be read: exit code 2."""
