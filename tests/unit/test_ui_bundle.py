"""The UI's bundle in the package belongs to the sources in ui/. ``./dev ui`` builds it; this needs no Node."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "ui"
DIST = ROOT / "airflow_delay_provider" / "ui" / "dist"
RECORD = json.loads((DIST / "build.json").read_text())
#: As in ui/scripts/buildRecord.ts.
NOT_PART_OF_THE_BUILD = {"node_modules", "README.md"}
REMEDY = "Run ./dev ui and commit airflow_delay_provider/ui/dist."


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_in(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name not in NOT_PART_OF_THE_BUILD:
            yield from files_in(path) if path.is_dir() else [path]


def test_the_bundle_was_built_from_these_sources() -> None:
    lines = [f"{path.relative_to(SOURCES).as_posix()}\0{sha256(path.read_bytes())}\n" for path in files_in(SOURCES)]
    assert sha256("".join(sorted(lines)).encode()) == RECORD["sources"], REMEDY


def test_the_files_of_the_bundle_are_those_that_were_built() -> None:
    found = {path.name: sha256(path.read_bytes()) for path in DIST.iterdir() if path.name != "build.json"}
    assert found == RECORD["files"], REMEDY


def test_the_lock_file_names_no_server() -> None:
    lock = json.loads((SOURCES / "package-lock.json").read_text())
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []


def test_versions_are_exact_and_each_package_of_the_bundle_has_its_reason() -> None:
    package = json.loads((SOURCES / "package.json").read_text())
    versions = package["dependencies"] | package["devDependencies"]
    assert [name for name, version in versions.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    assert [name for name in versions if f"| {name} |" not in reasons] == []
