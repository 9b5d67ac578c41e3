"""The table of docs/spark-failures.md, out of the corpus: `python -m tests.spark_corpus.report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from airflow_delay_provider.spark.failures import Verdict
from tests.spark_corpus.recorded import Recorded, recorded

PAGE = Path(__file__).parents[2] / "docs" / "spark-failures.md"
BEGIN = "<!-- made by python -m tests.spark_corpus.report -->"
END = "<!-- end of what is made -->"


def report() -> str:
    """Return the part of the page that follows from the recorded failures."""
    entries = recorded()
    return "\n".join([*_confusion(entries), "", *_by_mode(entries), "", *_undecided(entries)])


def page_with_report() -> str:
    """Return the page as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{report()}\n\n{END}{after}"


def _confusion(entries: list[Recorded]) -> Iterator[str]:
    counts = Counter((entry.expected, entry.finding().verdict) for entry in entries)
    yield "| is \\ called | " + " | ".join(Verdict) + " |"
    yield "|---" * (len(Verdict) + 1) + "|"
    for expected in Verdict:
        yield f"| **{expected}** | " + " | ".join(str(counts[expected, called] or "") for called in Verdict) + " |"


def _by_mode(entries: list[Recorded]) -> Iterator[str]:
    modes = Counter(entry.mode for entry in entries)
    right = sum(entry.finding().verdict is entry.expected for entry in entries)
    kinds = ", ".join(f"{count} {mode}" for mode, count in sorted(modes.items()))
    yield f"{len(entries)} failures ({kinds}), {right} called what they are."


def _undecided(entries: list[Recorded]) -> Iterator[str]:
    yield "Unknown, and why:"
    yield ""
    for entry in entries:
        if entry.finding().verdict is Verdict.UNKNOWN:
            yield f"* `{entry.name}`: {entry.why}"


if __name__ == "__main__":
    PAGE.write_text(page_with_report(), encoding="utf-8")
