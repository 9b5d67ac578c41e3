"""Where the programs of a RabbitMQ come from: this machine's packages, or a newer Debian in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.servers import process
from tools.servers.cache import CannotFillError, cache, cached, run
from tools.servers.server import UnavailableError

#: The real scripts; those in sbin insist on the service's user and its folders.
SCRIPTS = Path("/usr/lib/rabbitmq/bin")
#: Releases of Debian whose RabbitMQ is new enough; the first one that can be had is used.
SUITES = ("sid", "trixie")
OLDEST_MAJOR = 4
REPOSITORY = Path(__file__).parents[2]
#: A mount namespace of its own: what is mounted in it is gone with its last process, also after kill -9.
PRIVATE_MOUNTS = ("unshare", "--mount")
#: The same with process ids of its own, so that nothing that the program started outlives it.
PRIVATE_PROCESSES = (*PRIVATE_MOUNTS, "--pid", "--fork", "--kill-child", "--mount-proc")
#: Arguments: the root, the folders that look the same inside, ``--``, the command.
ENTER = """
root=$1; shift
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --bind "$1" "$root$1"; shift; done; shift
exec chroot "$root" "$@"
"""
#: Lines of debootstrap that name a stage, not one of a hundred packages.
STAGE = re.compile(r"I: ((?:Checking Release|Resolving dependencies of base|Installing core|Unpacking the base).*)")


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Programs of one RabbitMQ, and what makes a command line run them."""

    prefix: tuple[str, ...] = ()

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command line that runs a program of RabbitMQ or of its Erlang."""
        return [*self.prefix, program, *arguments]

    def script(self, name: str, *arguments: str) -> list[str]:
        """Return the command line that runs one of RabbitMQ's scripts."""
        return self.command(str(SCRIPTS / name), *arguments)


def installed_programs(*, variable: str) -> Programs:
    """Return those of this machine, installed if need be."""
    server = SCRIPTS / "rabbitmq-server"
    if not server.exists():
        process.apt_install("rabbitmq-server")
    if not server.exists():
        raise UnavailableError(f"no RabbitMQ server programs here: apt-get install rabbitmq-server, or set {variable}")
    return Programs()


def newer_programs(home: Path, *, variable: str) -> Programs:
    """Return those of a newer Debian, for a node whose files are in ``home``. They see this machine's files in
    ``home``, in the repository and in the folder for temporary files under the same names, and no others."""
    root = find_root(instead=f"or set {variable}")
    shared = {str(folder.resolve()) for folder in (REPOSITORY, Path(tempfile.gettempdir()), home)}
    return Programs(prefix=(*PRIVATE_MOUNTS, "sh", "-ec", ENTER, "sh", str(root), *sorted(shared), "--"))


def find_root(*, instead: str) -> Path:
    """Return the root folder of a Debian with a RabbitMQ that is new enough."""
    if os.geteuid() != 0 or not _succeeds([*PRIVATE_MOUNTS, "true"]):
        raise UnavailableError(
            f"RabbitMQ {OLDEST_MAJOR} runs in a root folder of its own, as root only; be root, {instead}"
        )
    for suite in SUITES:
        if (found := cache() / f"rabbitmq-{suite}").exists():
            return found
    if shutil.which("debootstrap") is None:
        process.apt_install("debootstrap", "debian-archive-keyring")
    if shutil.which("debootstrap") is None:
        raise UnavailableError(f"no debootstrap here to fetch RabbitMQ with: apt-get install debootstrap, {instead}")
    failures = []
    for suite in SUITES:
        for mirror in find_mirrors():
            try:
                return cached(f"rabbitmq-{suite}", partial(build_root, suite, mirror))
            except CannotFillError as failure:
                failures.append(f"Debian {suite}: {failure}")
    raise UnavailableError(
        f"no Debian with RabbitMQ {OLDEST_MAJOR} could be fetched: let apt-get use a mirror that has one, {instead}\n"
        + "\n".join(failures)
    )


def find_mirrors() -> list[str]:
    """Return where apt gets the release of this machine from; mirrors of updates have nothing else."""
    listing = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(listing, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
    targets = [line.split() for line in listed.splitlines()]
    return list(dict.fromkeys(uri for release, component, uri in targets if component == "main" and "-" not in release))


def build_root(suite: str, mirror: str, folder: Path) -> None:
    print(f"servers: fetching RabbitMQ of Debian {suite} with debootstrap, once; minutes and 400 MB", flush=True)
    what = ["--variant=minbase", "--include=rabbitmq-server", suite, str(folder), mirror]
    run([*PRIVATE_PROCESSES, "debootstrap", *what], on_line=_tell_stage)
    # Without it a node does not find itself.
    shutil.copy("/etc/hosts", folder / "etc/hosts")
    shutil.rmtree(folder / "var/cache/apt/archives")
    versions = [path.name.rpartition("-")[2] for path in (folder / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")]
    if not any(int(version.partition(".")[0]) >= OLDEST_MAJOR for version in versions):
        raise CannotFillError(f"has RabbitMQ {', '.join(versions)}, not {OLDEST_MAJOR} or newer")


def _tell_stage(line: str) -> None:
    if stage := STAGE.fullmatch(line):
        print(f"servers: debootstrap: {stage[1]}", flush=True)


def _succeeds(command: Sequence[str]) -> bool:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0
