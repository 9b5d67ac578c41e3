"""Signs in the lines of a log: exceptions, causes, frames, tracebacks, words of launchers and resource managers."""

from __future__ import annotations

import re

from airflow_delay_provider.spark.failures.text import record

TRACEBACK = "Traceback (most recent call last):"
DIRECT_CAUSE = "The above exception was the direct cause of the following exception:"
WHILE_HANDLING = "During handling of the above exception, another exception occurred:"
#: The line before a traceback that belongs to the exception above it.
WORKER_TRACEBACK = re.compile(r"from the Python worker|stack trace below\.$")

UNCAUGHT = re.compile(r'^Exception in thread "|^Uncaught exception|^Unhandled exception')
EXCEPTION = re.compile(
    r'^(?:\s{0,8}Caused by: |: |\s{0,8}Suppressed: |Exception in thread "[^"]{0,200}" )?'
    r"(?:[A-Za-z_$][\w$]{0,100}\.){0,20}[A-Z_][\w$]{0,100}"
    r"(?:Error|Exception|Throwable|Failure|Interrupt|Fault|Timeout|Exit|Refused|Denied|NotFound)(?=[:\s(]|$)"
    r"|^\s{0,8}Caused by: \S"
)
NAMES_EXCEPTION = re.compile(r"Traceback \(most|[a-z](?:Error|Exception)\b")
#: Records of what ended an application; other errors may be logged after them.
ENDING = re.compile(
    r"User class threw exception|: Uncaught exception: |Error initializing SparkContext|Exception from cluster"
)
#: Said by launchers, shells and interpreters, which belong to no log record.
LAUNCHER = re.compile(
    r"^(?:Error:(?: |$)|fatal:|# A fatal error|# There is insufficient memory|# java\.lang\.|Killed\b"
    r"|Segmentation fault|Aborted\b|Could not find valid SPARK_HOME|Unrecognized |Invalid (?:initial|maximum) heap)"
    r"|^\S{1,200}: (?:error: |line \d{1,6}: |can't open file|command not found|No such file|Permission denied|cannot )"
    r"|^\[[A-Z][A-Z0-9_.]{3,200}\] "
)
#: Said outside of any stack trace, mostly by resource managers.
STATEMENT = re.compile(
    r"^\s{0,8}(?:[Ee]rror occurred|diagnostics: (?!N/A|\[?AM container is launched)|[Tt]ermination (?:reason|message): "
    r"|exit code: |User class threw exception|User application exited|Server access error|Exit status: |Diagnostics: "
    r"|Container (?:killed|exited|released|marked|is running|\[pid)|Failing this attempt"
    r"|Application \S{1,60} (?:failed|was killed|is killed))"
)
FRAME = re.compile(
    r"^[\s|]{0,12}at \S|^\s{0,12}\.{3} \d{1,6} more|^\s{0,8}File \"|^\s*$|^Driver stacktrace:"
    r"|^\.\.\. \d{1,12} lines left out"
)
_TROUBLE = re.compile(r"(?i)exception|error|lost |fail|refused|timed out|killed|unresponsive|not accepted")
PLAN = re.compile(r"^\s*(?:[+:]-|:  |'[A-Z]|==|\||\^)")
#: The text of a query or its plan follows: words of the user, not of the failure.
QUERY_FOLLOWS = re.compile(r"^\s*== ?(?:SQL|DataFrame|Physical Plan|Parsed|Analyzed)|AnalysisException: [^\n]*;$")
#: A job that succeeds later shows that what failed before did not end the application.
JOB_DONE = re.compile(r"^DAGScheduler: Job \d{1,9} finished")
ERRORS = frozenset({"ERROR", "FATAL", "CRITICAL", "SEVERE"})


class Traceback:
    """Follows a traceback down to the name of its exception, which may be any."""

    def __init__(self) -> None:
        self.is_open = False
        self._code_follows = False

    def begin(self) -> None:
        self.is_open, self._code_follows = True, False

    def ends_with(self, line: str) -> bool:
        """Tell whether the line names the exception; frames may have lost their indentation on the way."""
        if not line[:1].strip(" ^~") or line.startswith('File "'):
            self._code_follows = line.startswith('File "')
            return False
        if self._code_follows and not EXCEPTION.match(line):
            self._code_follows = False
            return False
        self.is_open = False
        return True


def names_exception(statement: str) -> bool:
    """Tell whether the statement is an exception, and not just a remark."""
    return bool(EXCEPTION.match(statement) or NAMES_EXCEPTION.search(statement))


def decisive(line: str) -> bool:
    """Tell whether the line alone may matter: an error record, an exception, a cause, an error class."""
    entry = record(line)
    if entry.level:
        return entry.level in ERRORS or (entry.level.startswith("WARN") and bool(_TROUBLE.search(entry.text)))
    text = entry.text
    return bool(
        EXCEPTION.match(text)
        or LAUNCHER.match(text)
        or STATEMENT.match(text)
        or text.endswith(TRACEBACK)
        or "SQLSTATE: " in text
        or text.strip() in {DIRECT_CAUSE, WHILE_HANDLING}
    )


def opens_traceback(line: str) -> bool:
    """Tell whether Python frames follow, and after them the name of the exception."""
    return line.rstrip().endswith(TRACEBACK)
