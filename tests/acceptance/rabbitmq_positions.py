"""Where a RabbitMQ node keeps each message of a ladder, read from the node itself so that no message moves.

An AMQP client cannot tell: peeking at a queue is activity, and a message that the dead-letter worker of a queue holds
is in no state that AMQP shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pika

from tools.servers.rabbitmq import RabbitMQ

#: Messages that dead-letter workers of quorum queues hold: a line for each with its queue, its id, which queues must
#: still confirm it, which have refused it, how often it was published and for how many seconds it has been held.
_HELD = """
Id = fun(Message) ->
    case erlang:function_exported(mc, message_id, 1) of
        true -> {_, Name} = mc:message_id(Message), Name;
        false ->
            Content = rabbit_binary_parser:ensure_content_decoded(element(4, element(5, Message))),
            element(10, element(3, Content))
    end
end,
Names = fun(Queues) -> lists:join(",", [element(4, Queue) || Queue <- Queues]) end,
IsPending = fun(Value) -> is_tuple(Value) andalso element(1, Value) =:= pending end,
Now = os:system_time(millisecond),
Show = fun(Source, HeldMessage) ->
    Last = tuple_size(HeldMessage),
    [Unconfirmed, Refused, Published, Since] = [element(N, HeldMessage) || N <- [Last - 5, Last - 4, Last - 2, Last]],
    io:format(
        "held\\t~s\\t~s\\t~s\\t~s\\t~b\\t~.1f~n",
        [Source, Id(element(3, HeldMessage)), Names(Unconfirmed), Names(Refused), Published, (Now - Since) / 1000])
end,
lists:foreach(
    fun(Worker) ->
        try tuple_to_list(sys:get_state(Worker, 1000)) of
            [_, {resource, _, queue, Source} | More] ->
                [Show(Source, HeldMessage)
                    || Map <- More, is_map(Map), HeldMessage <- maps:values(Map), IsPending(HeldMessage)]
        catch
            exit:_ -> does_not_answer
        end
    end,
    [Worker || {_, Worker, _, _} <- supervisor:which_children(rabbit_fifo_dlx_sup), is_pid(Worker)]),
lists:foreach(
    fun(Process) ->
        case process_info(Process, [message_queue_len, registered_name, monitors, current_stacktrace]) of
            [{_, Length} | More] when Length > 0 -> io:format("blocked\\t~b in the mailbox of ~0p~n", [Length, More]);
            _ -> ok
        end
    end,
    processes()).
"""


@dataclass(frozen=True, kw_only=True)
class HeldMessage:
    """A message that a queue has given to its dead-letter worker and that has not reached the next queue."""

    queue: str
    message_id: str
    unconfirmed_by: tuple[str, ...]
    refused_by: tuple[str, ...]
    published: int
    seconds: float

    @property
    def why(self) -> str:
        if self.refused_by:
            return f"refused by {', '.join(self.refused_by)}"
        if self.unconfirmed_by:
            return f"not confirmed by {', '.join(self.unconfirmed_by)}"
        return "without a route"


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The messages that a node holds."""

    held: Mapping[str, HeldMessage] = field(default_factory=dict)
    #: Ready messages, by queue.
    ready: Mapping[str, int] = field(default_factory=dict)
    #: Processes with messages in their mailboxes, such as workers that do not answer, and what they wait for.
    blocked: Sequence[str] = ()
    #: Messages that have expired and that the dead-letter worker has not been given yet, by queue.
    behind: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        why = Counter(f"{held.queue}: {held.why}" for held in self.held.values())
        return "\n".join(
            (
                *(f"         blocked  {doing}" for doing in self.blocked),
                *(f"  {count:6d} held     {text}" for text, count in sorted(why.items())),
                *(f"  {count:6d} behind   {queue}" for queue, count in sorted(self.behind.items())),
                *(f"  {count:6d} ready    {queue}" for queue, count in sorted(self.ready.items())),
            )
        )


def find_positions(node: RabbitMQ) -> Positions:
    """Query the node."""
    held: dict[str, HeldMessage] = {}
    blocked: list[str] = []
    for line in node.control("eval", _HELD).splitlines():
        if line.startswith("blocked\t"):
            blocked.append(line.removeprefix("blocked\t"))
        if line.startswith("held\t"):
            _, queue, message_id, unconfirmed, refused, published, seconds = line.split("\t")
            held[message_id] = HeldMessage(
                queue=queue,
                message_id=message_id,
                unconfirmed_by=_names(unconfirmed),
                refused_by=_names(refused),
                published=int(published),
                seconds=float(seconds),
            )
    per_queue = Counter(each.queue for each in held.values())
    ready, behind = {}, {}
    columns = ("name", "messages_ready", "messages_unacknowledged", "messages")
    for line in node.control("list_queues", "--no-table-headers", *columns).splitlines():
        name, *numbers = line.split("\t")
        ready_here, unacknowledged, total = (int(number or 0) for number in numbers)
        if ready_here:
            ready[name] = ready_here
        if (more := total - ready_here - unacknowledged - per_queue[name]) > 0:
            behind[name] = more
    return Positions(held=held, blocked=blocked, ready=ready, behind=behind)


def parked_ids(node: RabbitMQ, queue: str) -> set[str]:
    """Return the ids of the ready messages of a queue without expiry."""
    found = set()
    with pika.BlockingConnection(pika.URLParameters(node.url)) as connection:
        channel = connection.channel()
        while True:
            method, properties, _body = channel.basic_get(queue)
            if method is None:
                return found
            found.add(properties.message_id)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
