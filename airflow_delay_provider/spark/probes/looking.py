"""Asking a cluster, or the user's own check, without ever waiting longer than was said."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta

from airflow_delay_provider.domain.dotted import load_function
from airflow_delay_provider.exceptions import ConfigurationError
from airflow_delay_provider.spark.probes.address import ClusterAddress
from airflow_delay_provider.spark.probes.asking import Probe
from airflow_delay_provider.spark.probes.clusters import look_at

#: Looks that are under way: who asks meanwhile waits for the same answer, so one that hangs costs one thread.
_looks: dict[ClusterAddress, Future[Probe]] = {}
_looks_lock = threading.Lock()


def probe(address: ClusterAddress, *, timeout: timedelta = timedelta(seconds=10)) -> Probe:
    """Say whether the cluster can take a job; blocks for ``timeout`` at most, whatever name servers or checks do.

    A cluster that cannot be reached is an answer, not an error; only a wrong configuration raises.
    """
    with _looks_lock:
        look = _looks.get(address)
        if look is None:
            look = _looks[address] = Future()
            # A little less for the questions: who was asked and did not answer says more than that time is up.
            work = (look, address, timeout.total_seconds() * 0.9)
            threading.Thread(target=_look, args=work, name="spark-probe", daemon=True).start()
    try:
        return look.result(timeout.total_seconds())
    except TimeoutError:
        return Probe(False, f"{address.name} gave no answer within {timeout.total_seconds():g} s")


def _look(look: Future[Probe], address: ClusterAddress, seconds: float) -> None:
    try:
        answer = look_at(address, seconds) if address.check is None else _run_check(address.check, address.conn_id)
    except Exception as error:  # noqa: BLE001 - whoever waits for the look gets it
        _finish(address)
        look.set_exception(error)
    else:
        _finish(address)
        look.set_result(answer)


def _finish(address: ClusterAddress) -> None:
    with _looks_lock:
        del _looks[address]


def _run_check(path: str, conn_id: str) -> Probe:
    check = load_function("cluster check", path, example="my_company.spark.is_up")
    try:
        is_up = check(conn_id)
    except Exception as error:  # noqa: BLE001 - a check may say no by raising
        return Probe(False, f"{path} raised {type(error).__name__}")
    if not isinstance(is_up, bool):
        raise ConfigurationError(f"cluster check: {path!r} returned {type(is_up).__name__}; return True or False")
    return Probe(is_up, f"{path} says that it is {'up' if is_up else 'down'}")
