"""Errors that are the user's to mend: each says what is wrong, why, and what to do."""


class UserError(Exception):
    """Shown as one message without a traceback; the command exits with 2."""


class ConfigError(UserError):
    """A config value that can't be: names the key, the value, the reason and the remedy."""


class DataError(UserError):
    """Data that is missing, empty, of the wrong schema or corrupt: names the path and the record."""


class FolderError(UserError):
    """A run folder that can't be used: written by another process or config, read-only, or full."""
