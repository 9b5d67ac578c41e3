from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tools.servers import process
from tools.servers.server import UnavailableError

DEBIAN_BINARIES = Path("/usr/lib/postgresql")
CLUSTER_DEFAULTS = Path("/etc/postgresql-common/createcluster.conf")
DATABASE = "delay"
# fsync stays on, as shipped: benchmarks and kill tests must pay for durability.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "100",
    "fsync": "on",
}


class Postgres:
    name = "postgres"
    variable = "DELAY_TEST_POSTGRES_URL"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._home: Path | None = None
        self._port = 0

    def start(self, run_dir: Path) -> None:
        binaries = find_binaries()
        # PostgreSQL refuses to run as root; Debian's package brings this user along.
        user = "postgres" if os.geteuid() == 0 else None
        log = run_dir / "logs" / "postgres.log"
        self._home = make_home(run_dir / "postgres", user)
        data = self._home / "data"
        initdb = f"{binaries}/initdb --no-sync --auth trust --encoding UTF8 --locale C -U {DATABASE} -D"
        run_logged([*initdb.split(), str(data)], log=log, user=user)
        for _ in range(3):  # another run may take the free port between our look and our start
            self._port = process.free_port()
            settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
            postgres = [f"{binaries}/postgres", "-D", str(data), "-p", str(self._port), *settings]
            self._process = process.spawn(postgres, log=log, death_signal=signal.SIGQUIT, user=user)
            if process.wait_until(lambda: says_ready(data), process=self._process, deadline_seconds=60):
                createdb = f"{binaries}/createdb -h 127.0.0.1 -p {self._port} -U {DATABASE} {DATABASE}"
                run_logged(createdb.split(), log=log)
                return
            process.stop(self._process, signals=[signal.SIGQUIT])
        raise RuntimeError(f"PostgreSQL did not start; see {log}")

    def env(self) -> dict[str, str]:
        return {self.variable: f"postgresql+psycopg://{DATABASE}@127.0.0.1:{self._port}/{DATABASE}"}

    def stop(self) -> None:
        if self._process is not None:
            # SIGINT: end the sessions and shut down cleanly; SIGQUIT: at once.
            process.stop(self._process, signals=[signal.SIGINT, signal.SIGQUIT])
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)


def find_binaries() -> Path:
    found = installed_binaries()
    if found is None and process.apt_install("postgresql-common"):
        forbid_default_cluster()
        process.apt_install("postgresql")
        found = installed_binaries()
    if found is None:
        raise UnavailableError(
            f"no PostgreSQL server programs here: apt-get install postgresql, or set {Postgres.variable}"
        )
    return found


def installed_binaries() -> Path | None:
    versions = sorted(DEBIAN_BINARIES.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if versions:
        return versions[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def forbid_default_cluster() -> None:
    """Debian's package would create and start an unwanted cluster of its own."""
    text = CLUSTER_DEFAULTS.read_text()
    CLUSTER_DEFAULTS.write_text(text.replace("#create_main_cluster = true", "create_main_cluster = false"))


def make_home(preferred: Path, user: str | None) -> Path:
    """A folder the server's user can reach; outside the checkout where only root can reach that."""
    preferred.mkdir(parents=True)
    if user is None:
        return preferred
    shutil.chown(preferred, user, user)
    if subprocess.run(["test", "-w", preferred], user=user, group=user, extra_groups=[]).returncode == 0:
        return preferred
    preferred.rmdir()
    home = Path(tempfile.mkdtemp(prefix="delay-postgres-"))
    shutil.chown(home, user, user)
    return home


def says_ready(data: Path) -> bool:
    """The eighth line of the server's pid file has its state; pg_ctl waits on it too."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"


def run_logged(command: list[str], *, log: Path, user: str | None = None) -> None:
    started = process.spawn(command, log=log, user=user)
    if started.wait() != 0:
        raise RuntimeError(f"{command[0]} failed; see {log}")
