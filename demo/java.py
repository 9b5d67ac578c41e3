"""A Java for Spark on a machine that need not have one."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from tests.servers.kafka_distribution import find_java

#: Spark asks for it at every start and does without it; the small Java that comes by pip has only what is needed.
SPARED_MODULE = "jdk.incubator.vector"
SHIM = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java_home(folder: Path) -> Path:
    """Return a JAVA_HOME; where Java lacks a module it is one in ``folder`` that does not ask for it."""
    java = find_java().resolve()
    if has_module(java, SPARED_MODULE):
        return java.parents[1]
    shim = folder / "java" / "bin" / "java"
    shim.parent.mkdir(parents=True)
    shim.write_text(SHIM.format(module=SPARED_MODULE, java=shlex.quote(str(java))))
    shim.chmod(0o755)
    return shim.parents[1]


def has_module(java: Path, module: str) -> bool:
    listed = subprocess.run(  # noqa: S603 - a Java that was found here
        [java, "--list-modules"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return any(line.partition("@")[0] == module for line in listed.splitlines())
