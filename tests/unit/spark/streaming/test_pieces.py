from __future__ import annotations

from random import Random

import pytest

from airflow_delay_provider.spark.streaming.frames import Frame, Kind, pack
from airflow_delay_provider.spark.streaming.processor import name_of, pieces


def frames_of(partition: int, offsets: range, size: int) -> list[Frame]:
    return [Frame(Kind.ACCEPTED, "inbox", partition, offset, 1, b"k", b"x" * size) for offset in offsets]


def test_few_new_messages_are_one_piece_in_the_order_of_their_records():
    rows = [frames_of(1, range(3), 10), frames_of(0, range(5, 7), 10)]
    (piece,) = pieces(pack(row) for row in rows)
    assert piece == [*rows[1], *rows[0]]


@pytest.mark.parametrize("seed", range(10))
def test_many_new_messages_are_the_same_small_pieces_in_whatever_order_their_rows_come(seed: int):
    rows = [frames_of(partition, range(n, n + 40), 100) for partition in range(3) for n in (0, 40)]
    shuffled = Random(seed).sample(rows, len(rows))
    found = {name_of(piece[0]): piece for piece in pieces((pack(row) for row in shuffled), most_bytes=1000)}
    assert found == {name_of(piece[0]): piece for piece in pieces((pack(row) for row in rows), most_bytes=1000)}
    assert sorted(frame for piece in found.values() for frame in piece) == sorted(
        frame for row in rows for frame in row
    )
    assert max(sum(len(frame.value or b"") for frame in piece) for piece in found.values()) <= 1000


def test_a_message_larger_than_a_piece_is_a_piece_alone():
    row = frames_of(0, range(3), 500)
    assert [len(piece) for piece in pieces([pack(row)], most_bytes=100)] == [1, 1, 1]
