"""The recorded failures, read back."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from airflow_delay_provider.spark.failures import Classification, Evidence, OutputWindow, Verdict, classify

LOGS = Path(__file__).parent / "logs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One failed job as it was recorded."""

    name: str
    expected: Verdict
    why: str
    mode: str
    held_out: bool
    evidence: Evidence

    def classification(self) -> Classification:
        return classify(self.evidence)


def recorded() -> list[Recorded]:
    """Return all of them, by name."""
    return [_read(path) for path in sorted(LOGS.glob("*.json"))]


def _read(path: Path) -> Recorded:
    meta = json.loads(path.read_text())
    evidence = Evidence(
        exit_code=meta["exit_code"],
        output=_window(path.stem),
        driver_state=meta.get("driver_state"),
        driver_output=_window(f"{path.stem}.driver"),
    )
    return Recorded(
        name=path.stem,
        expected=Verdict(meta["expected"]),
        why=meta["why"],
        mode=meta["mode"],
        held_out=meta["held_out"],
        evidence=evidence,
    )


def _window(name: str) -> list[str]:
    window = OutputWindow()
    for line in _text(name).splitlines():
        window.feed(line)
    return window.lines()


def _text(name: str) -> str:
    packed = LOGS / f"{name}.log.gz"
    if packed.exists():
        return gzip.decompress(packed.read_bytes()).decode()
    plain = LOGS / f"{name}.log"
    return plain.read_text() if plain.exists() else ""
