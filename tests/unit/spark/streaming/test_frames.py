from __future__ import annotations

from airflow_delay_provider.spark.streaming.frames import Frame, Kind, pack, unpack


def test_frames_are_unpacked_as_they_were_packed():
    frames = [
        Frame(Kind.HELD, "delay.v1.inbox", 3, 2**40, 2**50, b"key", b"value"),
        Frame(Kind.WRITE, "delay.v1.dead", -1, 0, 0, None, b"", [("a", b"\xff"), ("grün", b"")]),
        Frame(Kind.WRITE, "delay.v1.recalls", 0, 0, 0, b"", None),
        Frame(Kind.CLOCK, "", 0, 0, 1),
    ]
    assert list(unpack(pack(frames))) == frames


def test_a_header_without_a_value_keeps_none():
    (found,) = unpack(pack([Frame(Kind.WRITE, "t", -1, 0, 0, None, None, [("a", None)])]))  # type: ignore[list-item]
    assert found.headers == [("a", None)]


def test_packed_frames_can_be_joined():
    one, two = Frame(Kind.ENTRY, "", 1, 5, 0, None, b"x"), Frame(Kind.ENTRY, "", 2, 6, 0, None, b"y")
    assert list(unpack(pack([one]) + pack([two]))) == [one, two]
