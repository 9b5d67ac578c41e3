"""Find or prepare a Java for Spark."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from tools.servers.kafka_distribution import find_java

#: Spark requests it at every start but works without it. The small Java from pip does not have it.
MISSING_MODULE = "jdk.incubator.vector"
SHIM = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java_home(folder: Path) -> Path:
    """Return a JAVA_HOME; if Java lacks the module, one in ``folder`` that removes the request for it."""
    java = find_java().resolve()
    if has_module(java, MISSING_MODULE):
        return java.parents[1]
    shim = folder / "java" / "bin" / "java"
    shim.parent.mkdir(parents=True)
    shim.write_text(SHIM.format(module=MISSING_MODULE, java=shlex.quote(str(java))))
    shim.chmod(0o755)
    return shim.parents[1]


def has_module(java: Path, module: str) -> bool:
    listed = subprocess.run(  # noqa: S603 - a Java that find_java returned
        [java, "--list-modules"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return any(line.partition("@")[0] == module for line in listed.splitlines())
