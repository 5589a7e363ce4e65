"""What Ultralytics and the plugin log, as a list."""

from __future__ import annotations

import logging

from ultralytics.utils import LOGGER


class logged(logging.Handler):
    """``with logged() as messages: ...``: everything from level INFO on, in order."""

    def __enter__(self) -> list[str]:
        self.messages: list[str] = []
        self.before = LOGGER.level
        LOGGER.setLevel(logging.INFO)
        LOGGER.addHandler(self)
        return self.messages

    def __exit__(self, *error: object) -> None:
        LOGGER.removeHandler(self)
        LOGGER.setLevel(self.before)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
