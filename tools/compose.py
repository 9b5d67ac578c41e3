"""``python -m tools.compose``: checks docker-compose.yaml with Docker Compose, without Docker.

The program is this machine's, or that of a Debian package, which is fetched once. Where neither can be had, nothing is
checked, and a line says so.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tools.servers.cache import CannotFillError, cached, run
from tools.servers.rabbitmq_distribution import find_mirrors

FILE = Path(__file__).parents[1] / "docker-compose.yaml"
#: The Debian whose package is new enough, and where the program is in it.
SUITE = "trixie"
PROGRAM = Path("usr/libexec/docker/cli-plugins/docker-compose")


def main() -> int:
    try:
        command = find_compose()
    except CannotFillError as missing:
        print(f"skipped {FILE.name}, because Docker Compose cannot be had: {missing}")
        return 0
    return subprocess.run([*command, "--file", str(FILE), "config", "--quiet"], check=False).returncode


def find_compose() -> list[str]:
    """Return the command line that runs Docker Compose."""
    for installed in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(installed[0]) and _is_compose_2(installed):
            return installed
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise CannotFillError("no docker compose is installed, and this is no Debian")
    if not (mirrors := find_mirrors()):
        raise CannotFillError("no docker compose is installed, and apt-get knows no mirror")
    return [str(cached(f"docker-compose-{SUITE}-{platform.machine()}", partial(fetch, mirrors[0])) / PROGRAM)]


def fetch(mirror: str, folder: Path) -> None:
    """Unpack the package; apt-get checks its signature, and its own lists stay as they are."""
    print(f"fetching docker-compose of Debian {SUITE}, once; 13 MB", flush=True)
    apt = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial", "state"):
        (apt / part).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb {mirror} {SUITE} main\n")
    places = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": apt / "state",
        "Dir::State::Lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "",
    }
    options = [word for name, value in places.items() for word in ("--option", f"{name}={value}")]
    run(["apt-get", *options, "--quiet", "update"])
    run(
        [
            "sh",
            "-ec",
            'cd "$1"; shift; exec apt-get "$@"',
            "sh",
            str(apt),
            *options,
            "--quiet",
            "download",
            "docker-compose",
        ]
    )
    [package] = apt.glob("docker-compose_*.deb")
    run(["dpkg-deb", "--extract", str(package), str(folder)])
    shutil.rmtree(apt)


def _is_compose_2(command: list[str]) -> bool:
    done = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip().removeprefix("v").startswith("2.")


if __name__ == "__main__":
    sys.exit(main())
