"""Triggers of sensors that run as in a triggerer, and filters for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from airflow_delay_provider.domain.message import Message
from airflow_delay_provider.triggers.broker_thread import BrokerThread
from airflow_delay_provider.triggers.channel_watch import ChannelWatch
from airflow_delay_provider.triggers.message import ChannelTrigger


def never(_message: Message) -> bool:
    return False


def is_red(message: Message) -> bool:
    return message.payload == b"red"


def is_blue(message: Message) -> bool:
    return message.payload == b"blue"


def path_of(function: Callable[[Message], bool]) -> str:
    return f"{function.__module__}.{function.__name__}"


@asynccontextmanager
async def waiting(*triggers: ChannelTrigger) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Triggers that run until the end of the block, each a task that returns the payload of its first event."""

    async def first_event(trigger: ChannelTrigger) -> Any:
        return (await anext(trigger.run())).payload

    tasks = [asyncio.create_task(first_event(trigger)) for trigger in triggers]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for shared in list(BrokerThread._running.values()):
            shared.stop()
        for thread in threading.enumerate():
            if thread.name.startswith(ChannelWatch.__name__):
                await asyncio.to_thread(thread.join, 20)
