"""The built-in ledger is a file of one machine: whether everything that uses it runs there."""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_delay_provider.exceptions import ConfigurationError

if TYPE_CHECKING:
    from airflow_delay_provider.ledger.database import Ledger

#: Executors of Airflow that run tasks on the scheduler's machine, and those that do not.
_LOCAL = frozenset({"LocalExecutor", "airflow.executors.local_executor.LocalExecutor"})
_REMOTE = frozenset({"CeleryExecutor", "KubernetesExecutor"})


def require_local_executors(file: str) -> None:
    """Refuse the built-in ledger where an executor may run tasks on other machines.

    Each of them would write to a file of its own, which no dispatcher reads. ``dag.test()`` uses no executor.
    """
    if _supervisor_is_in_process():
        return
    from airflow_delay_provider.ledger.identity import REMEDY

    remote = [name for name in _configured_executors() if not _is_local(name)]
    if remote:
        raise ConfigurationError(
            f"ledger_url: is not set, so messages would wait in {file} on this machine, but [core] executor"
            f" {', '.join(remote)} runs tasks on other machines; {REMEDY}"
        )


def require_dispatcher_here(ledger: Ledger) -> None:
    """Refuse the built-in ledger in a task whose Airflow runs elsewhere, if no dispatcher has ever served the file.

    Containers of one deployment have a file each: the task would write to one, the dispatcher would read another.
    """
    if not _runs_in_a_task() or not _api_is_elsewhere():
        return
    from airflow_delay_provider.ledger.heartbeats import read_dispatchers
    from airflow_delay_provider.ledger.identity import REMEDY

    with ledger.read() as connection:
        is_served = bool(read_dispatchers(connection))
    if not is_served:
        raise ConfigurationError(
            f"ledger_url: is not set, so messages would wait in {ledger.name} on {socket.gethostname()!r}, but the API"
            f" server of Airflow, {_api_host()!r}, is another machine or container, and no dispatcher has ever served"
            f" this file; {REMEDY}. If all runs on this machine, start `airflow delay dispatcher` here first"
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
    """Return names and module paths, without aliases; ``Executor,alias:path;team=Executor`` is Airflow's form."""
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
        # Only the scheduler needs it; where it is not installed, it runs elsewhere.
        return False


def _api_host() -> str:
    """Return the host that tasks report to; by default it is this machine."""
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
    """Say whether an address is of this machine: only those can be listened at."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
