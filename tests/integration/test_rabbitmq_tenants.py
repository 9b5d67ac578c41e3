"""Two tenants in one vhost, each with a ladder, users and channels of its own: neither reaches objects of the other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from airflow_delay_provider.brokers.rabbitmq.broker import RabbitMQBroker
from airflow_delay_provider.brokers.rabbitmq.errors import PermissionDeniedError
from airflow_delay_provider.domain.exceptions import UnknownChannelError
from airflow_delay_provider.domain.lifecycle import FROM_THE_START
from tests.integration.rabbitmq_scene import ON_TIME, Scene, ids_of, wait_for
from tests.rabbits import config_of, fresh_vhost, problems, require_management, user

#: Queues and exchanges that only the shop may write to, and those of the bank.
SHOP_CHANNELS = ("reports", "events:report.made")
BANK_CHANNELS = ("payments", "transfers:made")


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A ladder that an administrator has made, and the permissions that docs/rabbitmq.md gives to its users."""

    scene: Scene
    name: str
    channels: tuple[str, ...]

    @property
    def _all(self) -> str:
        return rf"^{self.name}\.v1\..*"

    @property
    def publisher(self) -> dict[str, str]:
        return {"write": rf"^{self.name}\.v1\..*\.ingress\..*"}

    @property
    def reader(self) -> dict[str, str]:
        return {"read": rf"^{self.name}\.v1\.journal$"}

    @property
    def administrator(self) -> dict[str, str]:
        own = "|".join(channel.partition(":")[0] for channel in self.channels)
        return {"configure": self._all, "write": f"{self._all}|^({own})$", "read": self._all}

    @contextmanager
    def client(self, permissions: dict[str, str], **settings: Any) -> Iterator[RabbitMQBroker]:
        """A client of this tenant's ladder as a new user with these permissions."""
        settings = self.scene.settings | settings
        with user(self.scene.url, **permissions) as url, RabbitMQBroker(config_of(url, **settings)) as broker:
            yield broker


@pytest.fixture(scope="module")
def tenants(rabbitmq_version: str) -> Iterator[tuple[Tenant, Tenant]]:
    """The shop, whose users are not trusted here, and the bank."""
    with (
        fresh_vhost() as url,
        Scene(url, prefix="shop") as shop,
        Scene(url, prefix="bank") as bank,
    ):
        for scene, channels in ((shop, SHOP_CHANNELS), (bank, BANK_CHANNELS)):
            scene.queue(channels[0])
            exchange, _, key = channels[1].partition(":")
            with scene.amqp() as amqp:
                amqp.exchange_declare(exchange, "topic", durable=True)
                amqp.queue_bind(scene.queue(f"{exchange}.all"), exchange, key)
            scene.broker.create_topology(channels)
        yield (
            Tenant(scene=shop, name="shop", channels=SHOP_CHANNELS),
            Tenant(scene=bank, name="bank", channels=BANK_CHANNELS),
        )


def names_in(scene: Scene) -> set[str]:
    """All queues and exchanges that belong to ladders."""
    vhost = scene.url.rpartition("/")[2]
    found = set()
    for kind in ("queues", "exchanges"):
        answer = httpx.get(f"{require_management()}/api/{kind}/{vhost}", timeout=60)
        found |= {each["name"] for each in answer.raise_for_status().json() if ".v1." in each["name"]}
    return found


def require_nothing_arrived_at_the_bank(shop: Tenant, bank: Tenant) -> None:
    """What the shop published last has arrived, and nothing at the bank."""
    scene = shop.scene
    canary = scene.message("reports", after=1)
    scene.broker.schedule([canary])
    assert ids_of(scene.collect("reports", 1)) == [canary.id]
    assert [bank.scene.count(queue) for queue in ("payments", "transfers.all")] == [0, 0]


def require_refused(url: str, call: str, **arguments: Any) -> None:
    """The broker refuses a call of the plain client library for lack of a permission."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        amqp = connection.channel()
        amqp.confirm_delivery()
        with pytest.raises(ChannelClosedByBroker, match="ACCESS_REFUSED"):
            getattr(amqp, call)(**arguments)


def test_a_tenant_has_all_that_a_ladder_consists_of_for_itself(tenants: tuple[Tenant, Tenant]) -> None:
    shop, _ = tenants
    assert {name.split(".")[0] for name in names_in(shop.scene)} == {"shop", "bank"}
    for tenant in tenants:
        assert problems(tenant.scene.broker) == []
        with tenant.client(tenant.publisher) as broker:
            messages = [tenant.scene.message(channel, after=0.2) for channel in tenant.channels]
            broker.schedule(messages)
        for queue, message in zip(
            (tenant.channels[0], f"{tenant.channels[1].partition(':')[0]}.all"), messages, strict=True
        ):
            assert ids_of(tenant.scene.collect(queue, 1)) == [message.id]


@pytest.mark.parametrize("channel", BANK_CHANNELS)
@pytest.mark.parametrize("after", [0, 0.2])
def test_a_publisher_does_not_reach_a_channel_that_was_prepared_for_another_tenant(
    tenants: tuple[Tenant, Tenant], channel: str, after: float
) -> None:
    shop, bank = tenants
    with shop.client(shop.publisher) as broker:
        try:
            broker.schedule([shop.scene.message(channel, after=after)])
        except (UnknownChannelError, PermissionDeniedError):
            pass
        else:
            unroutable = shop.scene.topology.unroutable
            wait_for(lambda: shop.scene.count(unroutable), what="the message is parked at the shop")
            with shop.scene.amqp() as amqp:
                amqp.queue_purge(unroutable)
    require_nothing_arrived_at_the_bank(shop, bank)


def test_forged_routing_keys_and_headers_do_not_lead_to_another_tenant(tenants: tuple[Tenant, Tenant]) -> None:
    shop, bank = tenants
    own, other = shop.scene.topology, bank.scene.topology
    forged = 0
    with user(shop.scene.url, **shop.publisher) as url, pika.BlockingConnection(pika.URLParameters(url)) as connection:
        amqp = connection.channel()
        amqp.confirm_delivery()
        for delay_ms in (0, 100):
            for channel in (*BANK_CHANNELS, f"0.{BANK_CHANNELS[0]}", f"bank.v1.{BANK_CHANNELS[0]}"):
                entry, key = own.route(channel, delay_ms)
                copies = {"CC": [key, channel], "BCC": [key, channel]}
                headers = {"delay-channel": channel, "delay-deliver-at": 0} | copies
                amqp.basic_publish(entry, key, b"forged", pika.BasicProperties(headers=headers, delivery_mode=2))
                forged += 1
        key = other.route("payments", 0)[1]
        for exchange in (other.ingress(None), other.ingress(100), other.dispatch, other.exit, other.journal_name):
            require_refused(url, "basic_publish", exchange=exchange, routing_key=key, body=b"forged")
        require_refused(url, "basic_publish", exchange="", routing_key="payments", body=b"forged")
    wait_for(lambda: shop.scene.count(own.unroutable) >= forged, what="all that was forged is parked at the shop")
    with shop.scene.amqp() as amqp:
        amqp.queue_purge(own.unroutable)
    require_nothing_arrived_at_the_bank(shop, bank)


def test_a_consumer_that_requeues_a_forged_message_does_not_carry_it_to_another_tenant(
    tenants: tuple[Tenant, Tenant],
) -> None:
    shop, bank = tenants
    own = shop.scene.topology
    with user(shop.scene.url, **shop.publisher) as url, pika.BlockingConnection(pika.URLParameters(url)) as connection:
        entry, key = own.route("reports", 0)
        forged = pika.BasicProperties(headers={"delay-channel": "payments"}, delivery_mode=2)
        connection.channel().basic_publish(entry, key, b"forged", forged)
    with shop.client(shop.publisher | {"read": "^reports$"}) as consumer:
        (delivery,) = wait_for(lambda: consumer.receive("reports"), what="the forged message")
        try:
            consumer.requeue(delivery, timedelta(0))
        except (UnknownChannelError, PermissionDeniedError):
            consumer.ack([delivery])
        else:
            wait_for(lambda: shop.scene.count(own.unroutable), what="the message is parked at the shop")
    with shop.scene.amqp() as amqp:
        amqp.queue_purge(own.unroutable)
    require_nothing_arrived_at_the_bank(shop, bank)


def test_a_journal_contains_nothing_of_another_tenant_and_is_read_by_its_own_users_only(
    tenants: tuple[Tenant, Tenant],
) -> None:
    shop, bank = tenants
    secret = bank.scene.message("payments", after=0.1, payload=b"IBAN")
    bank.scene.broker.schedule([secret])
    bank.scene.collect("payments", 1)
    with bank.client(bank.reader) as reader:
        wait_for(lambda: secret.id in reader.find_outcomes([secret.id], since=FROM_THE_START), what="the outcome")
    with shop.client(shop.reader | shop.publisher) as reader:
        reader.journal_end()
        assert secret.id not in {entry.message_id for entry in reader.read_journal(after=FROM_THE_START)}
    with shop.client(shop.administrator, prefix="bank") as reader:
        for look in (
            reader.journal_end,
            lambda: reader.read_journal(after=FROM_THE_START),
            lambda: reader.find_outcomes([secret.id], since=FROM_THE_START),
        ):
            with pytest.raises(PermissionDeniedError, match="lacks a permission"):
                look()
    with user(shop.scene.url, **shop.administrator) as url:
        for queue in (bank.scene.topology.journal_name, bank.scene.topology.unroutable, bank.scene.topology.rung(100)):
            require_refused(url, "basic_get", queue=queue)


def test_an_administrator_of_one_tenant_cannot_route_to_or_from_another(tenants: tuple[Tenant, Tenant]) -> None:
    shop, bank = tenants
    own, other = shop.scene.topology, bank.scene.topology
    with shop.client(shop.administrator) as broker:
        broker.create_topology(SHOP_CHANNELS)
        assert problems(broker) == []
    with user(shop.scene.url, **shop.administrator) as url:
        spy = f"{own.prefix}.spy"
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            connection.channel().queue_declare(spy, durable=True)
        to_payments = {"x-dead-letter-exchange": "transfers", "x-dead-letter-routing-key": "made"}
        for call, arguments in (
            ("queue_bind", {"queue": "payments", "exchange": own.exit, "routing_key": "#"}),
            ("queue_bind", {"queue": spy, "exchange": other.ingress(None), "routing_key": ""}),
            ("exchange_bind", {"destination": other.ingress(None), "source": own.exit, "routing_key": "#"}),
            ("exchange_bind", {"destination": own.exit, "source": other.dispatch, "routing_key": "#"}),
            ("exchange_delete", {"exchange": other.ready}),
            ("queue_purge", {"queue": other.unroutable}),
            ("queue_declare", {"queue": f"{own.prefix}.relay.transfers:made", "arguments": to_payments}),
        ):
            require_refused(url, call, **arguments)
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            connection.channel().queue_delete(spy)
    assert problems(bank.scene.broker) == []


def test_within_one_ladder_a_publisher_reaches_every_channel_that_was_prepared(
    tenants: tuple[Tenant, Tenant],
) -> None:
    """Why tenants who do not trust each other have a ladder each: it lends the rights of its administrator."""
    _, bank = tenants
    with user(bank.scene.url, **bank.publisher) as url:
        require_refused(url, "basic_publish", exchange="", routing_key="payments", body=b"x")
        message = bank.scene.message("payments", after=0.1)
        with RabbitMQBroker(config_of(url, **bank.scene.settings)) as broker:
            broker.schedule([message])
    assert ids_of(bank.scene.collect("payments", 1)) == [message.id]


def test_a_ladder_that_is_deleted_takes_nothing_of_another_tenant_with_it(tenants: tuple[Tenant, Tenant]) -> None:
    shop, bank = tenants
    before = {name for name in names_in(bank.scene) if name.startswith("bank.")}
    waiting = bank.scene.message("payments", after=2)
    bank.scene.broker.schedule([waiting])
    shop.scene.broker.delete_topology(even_if_messages_wait=True)
    assert {name for name in names_in(bank.scene) if name.startswith("bank.")} == before
    left = {re.sub(r"^shop\.v1\.", "", name) for name in names_in(shop.scene) if name.startswith("shop.")}
    assert {name for name in left if ".relay." not in name} == {
        "journal",
        "unroutable",
        "alternate",
        "unrouted",
        "parking",
        "1.parked",
        "1.parked.log",
    }
    [arrival] = bank.scene.collect("payments", 1)
    assert arrival.message.id == waiting.id
    assert arrival.lateness < ON_TIME
    shop.scene.broker.create_topology(SHOP_CHANNELS)
