"""The exponential buckets of nurkiewicz/kafka-scheduler, as its README describes them, simulated.

Bucket 0 holds what is due within a second, bucket k what is due in 2^(k-1) to 2^k seconds. A scanner looks at bucket k
every 2^(k-1) seconds, at bucket 0 every 100 ms ("quite frequently"), takes what it finds, and delivers it, or writes it
into the bucket for the time that is left, which may be the same. All scanners begin to count at the same moment.
"""

from __future__ import annotations

import math
from random import Random

SCAN_ZERO_MS = 100
FIRST_MS = 1000
LONGEST_PERIOD_MS = FIRST_MS << 30


def bucket_of(remaining_ms: int) -> int:
    """Return the bucket for what is due after ``remaining_ms``."""
    return 0 if remaining_ms < FIRST_MS else math.frexp(remaining_ms / FIRST_MS)[1]


def bucket_count(cover_ms: int) -> int:
    """Return how many buckets there must be."""
    return bucket_of(cover_ms) + 1


def writes_of(delay_ms: int, random: Random) -> int:
    """Return how often scanners write a message, its delivery among them; the sender's own write is not."""
    sent_at = at = random.randrange(LONGEST_PERIOD_MS)
    due, writes = sent_at + delay_ms, 0
    while at < due:
        bucket = bucket_of(due - at)
        every = SCAN_ZERO_MS if bucket == 0 else FIRST_MS << (bucket - 1)
        at = (at // every + 1) * every
        writes += 1
    return writes
