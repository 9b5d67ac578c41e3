"""What every broker promises through the port. An adapter's test file brings a harness and inherits all of it."""

from __future__ import annotations

from tests.contract.conflicts import ConflictContract
from tests.contract.consuming import ConsumingContract
from tests.contract.control import ControlContract
from tests.contract.journal import JournalContract
from tests.contract.replay import ReplayContract
from tests.contract.scheduling import SchedulingContract
from tests.contract.waiting import SharedConsumerContract


class BrokerContract:
    """Nest one class per part, so that what a broker cannot do is skipped part by part."""

    class TestScheduling(SchedulingContract): ...

    class TestConflicts(ConflictContract): ...

    class TestControl(ControlContract): ...

    class TestConsuming(ConsumingContract): ...

    class TestSharedConsumer(SharedConsumerContract): ...

    class TestJournal(JournalContract): ...

    class TestReplay(ReplayContract): ...
