"""The histogram of lateness: fixed buckets, about six in each decade from 1 ms to 1 day.

A bucket is named by its upper bound, so that figures stay readable if the bounds are changed one day.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, case, literal_column

_DAY_MS = 86_400_000
_PER_DECADE = (10, 15, 22, 33, 47, 68)
#: The upper bounds, which belong to their buckets.
BOUNDS_MS = (1, 2, 3, 5, 7, *(each * 10**power for power in range(7) for each in _PER_DECADE), _DAY_MS)
#: The bucket of messages that were dispatched before they were due.
EARLY = -1
#: The bucket of messages of which it is not known when they were dispatched.
UNKNOWN = -2
#: The bucket of messages that were more than a day late.
LATER = 10**15


def bucket_of(lateness_ms: ColumnElement[int]) -> ColumnElement[int]:
    """Return the bucket of a lateness."""
    bounds: list[ColumnElement[int]] = [literal_column(str(bound)) for bound in BOUNDS_MS]
    return case(
        (lateness_ms < 0, literal_column(str(EARLY))),
        *((lateness_ms <= bound, bound) for bound in bounds),
        else_=literal_column(str(LATER)),
    )


def quantiles(counts: Mapping[int, int], shares: Sequence[float], *, max_ms: int) -> list[float | None]:
    """Return the lateness in milliseconds that each share of the messages did not exceed; None without messages.

    Inside of a bucket, messages are taken as evenly spread, and none as later than ``max_ms``. Early messages are left
    out: they are counted by themselves. So are those of unknown lateness.

    :param shares: in ascending order.
    """
    late = sorted((bucket, n) for bucket, n in counts.items() if bucket >= 0 and n > 0)
    total = sum(n for _, n in late)
    ranks = [share * total for share in reversed(shares)]
    found: list[float | None] = []
    before = 0
    for bucket, n in late:
        while ranks and before + n >= ranks[-1]:
            lower, upper = _lower_bound(bucket), min(bucket, max_ms)
            found.append(max(0.0, min(lower, upper) + (upper - min(lower, upper)) * (ranks.pop() - before) / n))
        before += n
    return found or [None] * len(shares)


def _lower_bound(bucket: int) -> int:
    position = bisect_left(BOUNDS_MS, bucket)
    return BOUNDS_MS[position - 1] if position else 0
