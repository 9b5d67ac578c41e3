"""A process that waits like a triggerer, so that tests can end it in every way.

``python -m tests.acceptance.waiting_triggers queue [sensors]`` waits over the connection ``rabbit`` for messages that
no filter lets pass. SIGTERM cancels the triggers, as a triggerer that shuts down does.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.triggers.message import ChannelTrigger

NEVER = "tests.acceptance.waiting_triggers.never"


def never(_message: Message) -> bool:
    return False


async def wait(queue: str, sensors: int) -> None:
    async def first_event() -> object:
        return await anext(ChannelTrigger(channel=queue, delay_conn_id="rabbit", filter=NEVER).run())

    triggers = asyncio.gather(*(first_event() for _ in range(sensors)), return_exceptions=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, triggers.cancel)
    with suppress(asyncio.CancelledError):
        await triggers


if __name__ == "__main__":
    asyncio.run(wait(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1))
