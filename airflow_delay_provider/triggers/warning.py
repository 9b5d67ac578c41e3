"""A waiting task says in its log when no dispatcher serves the messages that it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.triggers.base import BaseTrigger

    from airflow_delay_provider.triggers.journal import JournalTail

#: Between two looks at what the journal tail has found out.
LOOK_SECONDS = 5.0
#: The same warning is repeated after this time.
REPEAT_SECONDS = 600.0


@asynccontextmanager
async def warning_of_dispatchers(tail: JournalTail, trigger: BaseTrigger) -> AsyncIterator[None]:
    """Warn while the body waits: when it begins to be true, and again now and then."""
    # A task that is made here logs as its trigger does.
    telling = asyncio.create_task(_tell(tail, trigger))
    try:
        yield
    finally:
        telling.cancel()


async def _tell(tail: JournalTail, trigger: BaseTrigger) -> None:
    told_at: float | None = None
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        warning, now = tail.dispatcher_warning, time.monotonic()
        if warning is None and told_at is not None:
            trigger.log.info("A dispatcher serves the awaited messages again")
            told_at = None
        elif warning is not None and (told_at is None or now - told_at >= REPEAT_SECONDS):
            trigger.log.warning("The awaited messages are not dispatched: %s", warning)
            told_at = now
