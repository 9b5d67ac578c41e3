"""Open the configured ledger, and refuse the built-in SQLite file where processes on other machines would need it."""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_delay_provider.domain.exceptions import ConfigurationError

if TYPE_CHECKING:
    from airflow_delay_provider.brokers.ledger.database import Ledger

#: Airflow's executors that run tasks on the scheduler's machine, and those that do not.
_LOCAL = frozenset({"LocalExecutor", "airflow.executors.local_executor.LocalExecutor"})
_REMOTE = frozenset({"CeleryExecutor", "KubernetesExecutor"})


def open_configured_ledger(*, for_messages: bool = True) -> Ledger:
    """Open the ledger of ``[delay] ledger_url``, by default a SQLite file in Airflow's home.

    The default is refused where no dispatcher would ever see its messages.

    :param for_messages: False if the ledger is only read, for which a local file does no harm.
    """
    from airflow.sdk.configuration import conf

    from airflow_delay_provider.brokers.ledger.database import Ledger, default_ledger_url

    url: str = conf.get("delay", "ledger_url", fallback="")
    if url or not for_messages:
        return Ledger(url or default_ledger_url())
    require_local_executors(default_ledger_url())
    ledger = Ledger(default_ledger_url())
    require_dispatcher_here(ledger)
    return ledger


def require_local_executors(file: str) -> None:
    """Refuse the built-in ledger if an executor may run tasks on other machines.

    Each machine would write to its own file, which no dispatcher reads. ``dag.test()`` uses no executor.
    """
    if _supervisor_is_in_process():
        return
    from airflow_delay_provider.brokers.ledger.database import REMEDY

    remote = [name for name in _configured_executors() if not _is_local(name)]
    if remote:
        raise ConfigurationError(
            f"ledger_url: is not set, so messages would be stored in {file} on this machine, but [core] executor"
            f" {', '.join(remote)} runs tasks on other machines; {REMEDY}"
        )


def require_dispatcher_here(ledger: Ledger) -> None:
    """Refuse the built-in ledger if Airflow's API server is on another machine and no dispatcher has served the file.

    In a deployment of containers each has its own file: the task would write to one, and the dispatcher would read
    another.
    """
    if not _runs_in_a_task() or not _api_is_elsewhere():
        return
    from airflow_delay_provider.brokers.ledger.database import REMEDY
    from airflow_delay_provider.brokers.ledger.heartbeats import read_dispatchers

    with ledger.read() as connection:
        is_served = bool(read_dispatchers(connection))
    if not is_served:
        raise ConfigurationError(
            f"ledger_url: is not set, so messages would be stored in {ledger.name} on {socket.gethostname()!r}, but"
            f" Airflow's API server, {_api_host()!r}, is another machine or container, and no dispatcher has ever"
            f" served this file; {REMEDY}. If everything runs on this machine, start `airflow delay dispatcher` first"
        )


def _supervisor() -> Any:
    from airflow.sdk.execution_time import task_runner

    return getattr(task_runner, "SUPERVISOR_COMMS", None)


def _supervisor_is_in_process() -> bool:
    from airflow.sdk.execution_time.supervisor import InProcessSupervisorComms

    return isinstance(_supervisor(), InProcessSupervisorComms)


def _runs_in_a_task() -> bool:
    return _supervisor() is not None and not _supervisor_is_in_process()


def _configured_executors() -> list[str]:
    """Return names or module paths without aliases; Airflow writes them as ``Executor,alias:path;team=Executor``."""
    from airflow.sdk.configuration import conf

    by_team = conf.get("core", "executor").split(";")
    if not conf.getboolean("core", "multi_team", fallback=False):
        by_team = [names for names in by_team if "=" not in names.lstrip("=")]
    each = [name.strip() for names in by_team for name in names.rpartition("=")[2].split(",")]
    return [name.rpartition(":")[2] for name in each if name]


def _is_local(name: str) -> bool:
    if name in _LOCAL:
        return True
    module, _, executor = name.rpartition(".")
    if name in _REMOTE or not module:
        return False
    try:
        return bool(getattr(importlib.import_module(module), executor).is_local)
    except (ImportError, AttributeError):
        # Only the scheduler needs the module. If it is missing here, the executor runs elsewhere.
        return False


def _api_host() -> str:
    """Return the host of the API that tasks talk to; this machine by default."""
    from airflow.sdk.configuration import conf

    url: str = conf.get("core", "execution_api_server_url", fallback="") or conf.get("api", "base_url", fallback="")
    return urlsplit(url or "").hostname or "localhost"


def _api_is_elsewhere() -> bool:
    host = _api_host()
    if host in ("localhost", socket.gethostname()):
        return False
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return not any(_is_own_address(family, address) for family, _, _, _, address in found)


def _is_own_address(family: int, address: Any) -> bool:
    """Return whether this machine has the address: only then a socket can be bound to it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
