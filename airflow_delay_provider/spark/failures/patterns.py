"""Regular expressions for the lines of a log: record prefixes, exceptions, causes, frames, launchers, secrets."""

from __future__ import annotations

import re

# -- the form of a line --------------------------------------------------------------------------------------------

#: The prefix that Airflow and container runtimes put before each line.
TRANSPORT = re.compile(
    r"^(?:\[\d{4}-\d\d-\d\d[T ][^\]]{8,40}\] \{{1,2}[^}]{1,200}\}{1,2} [A-Z]{4,8} -(?: |$)"
    r"|\[\d{4}-\d\d-\d\dT[\d:.,]{8,20}Z?\] "
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,]?\d{0,9}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?)"
)
RECORD = re.compile(
    r"^(?:\[?(?:\d{2,4}[-/]\d\d[-/]\d{2,4}[T ])?\d\d:\d\d:\d\d\S{0,12}(?: UTC| [+-]\d{4})?\s+(?:- )?"
    r"(?:\[[^\]]{0,200}\]\s+)?(?:\S{1,100}\s+(?:- )?)?)?"
    r"(?P<level>TRACE|DEBUG|INFO|WARN|WARNING|ERROR|FATAL|CRITICAL|SEVERE)\b(?P<text>.*)$",
    re.DOTALL,
)
#: A time before a line that begins no record.
TIMESTAMP = re.compile(r"^\[?\d{2,4}[-/]\d\d[-/]\d{2,4}[T ]\d\d:\d\d:\d\d[.,\d]{0,10}\]? ")
ERROR_LEVELS = frozenset({"ERROR", "FATAL", "CRITICAL", "SEVERE"})

# -- data of the user inside a message -----------------------------------------------------------------------------

NAME = re.compile(r"`[^`\n]{1,200}`")
QUOTED_VALUE = re.compile(
    r"(?i)((?:\b|_)(?:value|string|column|field|key|label|literal|near|row|attribute)s?[:=]? {0,2}| = (?='))"
    r"(?:'[^'\n]{1,200}'|\"[^\"\n]{1,200}\")"
)
#: Paths and URLs of data: the names of their folders say nothing about the failure.
DATA_PATH = re.compile(
    r"\b((?:s3[an]?|gs|abfss?|wasbs?|hdfs|viewfs|dbfs|oss|file):/{1,3})[^\s:'\",()]{1,1000}"
    r"|(?<![\w:/.])(?<!url: )/(?:[\w.=+\-]{1,200}/){1,40}[\w.=+\-]{0,200}"
)
#: Each with its replacement.
SECRETS = (
    (re.compile(r"(://[^/\s:@]{1,200}:)[^@\s/]{1,500}(@)"), r"\1***\2"),
    (
        re.compile(
            r"(?i)((?:password|passwd|pwd|secret|token|credential|api[_-]?key|access[_-]?key|account[._-]?key|signature|sig)"
            r"(?!\w{0,60}(?:Error|Exception))[\w.\-]{0,60}[\"']?\s{0,3}[=:]\s{0,3}[\"']?)[^\s\"'&;,)]{1,500}"
        ),
        r"\1***",
    ),
    (re.compile(r"(?i)(bearer |basic )[\w.~+/=\-]{8,4000}"), r"\1***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,32}\b"), "***"),
)

# -- exceptions and stack traces -----------------------------------------------------------------------------------

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
FRAME = re.compile(
    r"^[\s|]{0,12}at \S|^\s{0,12}\.{3} \d{1,6} more|^\s{0,8}File \"|^\s*$|^Driver stacktrace:"
    r"|^\.\.\. \d{1,12} lines left out"
)
PLAN = re.compile(r"^\s*(?:[+:]-|:  |'[A-Z]|==|\||\^)")
#: The text of a query or its plan follows: words of the user, not of the failure.
QUERY_FOLLOWS = re.compile(r"^\s*== ?(?:SQL|DataFrame|Physical Plan|Parsed|Analyzed)|AnalysisException: [^\n]*;$")

# -- records and remarks about a failure ---------------------------------------------------------------------------

#: Records of the failure that ended an application; other errors may be logged after them.
ENDING = re.compile(
    r"User class threw exception|: Uncaught exception: |Error initializing SparkContext|Exception from cluster"
)
#: Messages of launchers, shells and interpreters, which belong to no log record.
LAUNCHER = re.compile(
    r"^(?:Error:(?: |$)|fatal:|# A fatal error|# There is insufficient memory|# java\.lang\.|Killed\b"
    r"|Segmentation fault|Aborted\b|Could not find valid SPARK_HOME|Unrecognized |Invalid (?:initial|maximum) heap)"
    r"|^\S{1,200}: (?:error: |line \d{1,6}: |can't open file|command not found|No such file|Permission denied|cannot )"
    r"|^\[[A-Z][A-Z0-9_.]{3,200}\] "
)
#: Messages outside of any stack trace, mostly of resource managers.
STATEMENT = re.compile(
    r"^\s{0,8}(?:[Ee]rror occurred|diagnostics: (?!N/A|\[?AM container is launched)|[Tt]ermination (?:reason|message): "
    r"|exit code: |User class threw exception|User application exited|Server access error|Exit status: |Diagnostics: "
    r"|Container (?:killed|exited|released|marked|is running|\[pid)|Failing this attempt"
    r"|Application \S{1,60} (?:failed|was killed|is killed))"
)
#: Words of a warning that may matter.
TROUBLE = re.compile(r"(?i)exception|error|lost |fail|refused|timed out|killed|unresponsive|not accepted")
#: A job that succeeds later shows that earlier failures did not end the application.
JOB_DONE = re.compile(r"^DAGScheduler: Job \d{1,9} finished")
