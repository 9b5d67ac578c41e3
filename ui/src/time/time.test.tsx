import { act, screen } from "@testing-library/react";
import { vi } from "vitest";

import { show } from "../testing/show";
import { noteServerTime, serverNow } from "./clock";
import { Countdown } from "./Countdown";
import { Moment } from "./Moment";
import { describeDistance, describeSpan } from "./span";
import { fromInput, toInput } from "./zone";

const NOW = Date.parse("2026-11-18T12:00:00Z");

beforeEach(() => {
  vi.useFakeTimers({ now: NOW });
});
afterEach(() => {
  noteServerTime(new Date().toUTCString());
  vi.useRealTimers();
});

test.each([
  [0, "0 ms"],
  [850, "850 ms"],
  [61_000, "1 min 1 s"],
  [3_600_000, "1 h"],
  [90_061_000, "1 d 1 h"],
  [-5000, "5 s"],
])("%i ms is %s", (ms, text) => expect(describeSpan(ms)).toBe(text));

test("a distance says whether it is past or to come", () => {
  expect(describeDistance(NOW + 5000, NOW)).toBe("in 5 s");
  expect(describeDistance(NOW - 5000, NOW)).toBe("5 s ago");
  expect(describeDistance(NOW, NOW)).toBe("now");
});

test("a countdown counts down and then says how long the message is overdue", () => {
  show(<Countdown at="2026-11-18T12:00:03Z" />);
  expect(screen.getByText("in 3 s")).toHaveAttribute("title", "2026-11-18 12:00:03.000 UTC");
  act(() => void vi.advanceTimersByTime(3000));
  expect(screen.getByText("due now")).toBeVisible();
  act(() => void vi.advanceTimersByTime(60_000));
  expect(screen.getByText("1 min overdue")).toBeVisible();
});

test("a wrong clock of the viewer is corrected by that of the server", () => {
  noteServerTime("Wed, 18 Nov 2026 13:00:00 GMT");
  expect(serverNow()).toBe(NOW + 3_600_000);
});

test("a time is shown in the zone that is chosen in Airflow, with UTC on hover", () => {
  localStorage.setItem("timezone", JSON.stringify("Asia/Tokyo"));
  show(<Moment at="2026-11-18T12:00:00.500Z" />);
  const time = screen.getByText("2026-11-18 21:00:00");
  expect(time).toHaveAttribute("title", "2026-11-18 12:00:00.500 UTC");
  expect(time).toHaveAttribute("datetime", "2026-11-18T12:00:00.500Z");
});

test.each([
  ["2026-01-15T09:30", "2026-01-15T08:30:00.000Z"],
  ["2026-07-15T09:30", "2026-07-15T07:30:00.000Z"],
  ["2026-03-29T03:30", "2026-03-29T01:30:00.000Z"],
  ["2026-10-25T05:00", "2026-10-25T04:00:00.000Z"],
])("the input %s in Berlin is %s", (input, iso) => {
  expect(fromInput(input, "Europe/Berlin")).toBe(iso);
  expect(toInput(iso, "Europe/Berlin")).toBe(input);
});
