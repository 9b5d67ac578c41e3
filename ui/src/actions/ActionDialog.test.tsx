import { screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { vi } from "vitest";

import type { ActionResult } from "../api/client";
import { type Call, fakeApi, problem } from "../testing/fakeApi";
import { show } from "../testing/show";
import { ActionDialog } from "./ActionDialog";
import type { Action } from "./perform";

const CANCEL: Action = { name: "cancel", target: { ids: ["a", "b"] } };

function result(changes: Partial<ActionResult> = {}): { body: ActionResult } {
  return {
    body: {
      action: "cancel",
      dry_run: false,
      matched: 2,
      is_exact: true,
      changed: 2,
      refused: [],
      next: null,
      deliver_at: null,
      ...changes,
    },
  };
}

function open(action: Action) {
  const onClose = vi.fn();
  const onDone = vi.fn();
  show(<ActionDialog action={action} onClose={onClose} onDone={onDone} />);
  return { onClose, onDone, user: userEvent.setup() };
}

function bodies(calls: Call[]): unknown[] {
  return calls.filter(({ method }) => method === "POST").map(({ body }) => body);
}

test("nothing changes before the count is confirmed", async () => {
  const calls = fakeApi({ "/actions/cancel": () => result() });
  const { user, onClose } = open(CANCEL);
  expect(await screen.findByText("2 messages")).toBeVisible();
  expect(bodies(calls)).toEqual([{ ids: ["a", "b"], dry_run: true }]);
  await user.click(screen.getByRole("button", { name: "Back" }));
  expect(onClose).toHaveBeenCalled();
  expect(bodies(calls)).toHaveLength(1);
});

test("a confirmed action changes the messages and closes the dialog", async () => {
  const calls = fakeApi({ "/actions/cancel": () => result() });
  const { user, onClose, onDone } = open(CANCEL);
  await user.click(await screen.findByRole("button", { name: "Cancel 2 messages" }));
  await waitFor(() => expect(onClose).toHaveBeenCalled());
  expect(onDone).toHaveBeenCalled();
  expect(bodies(calls)[1]).toEqual({ ids: ["a", "b"], dry_run: false });
  expect(calls.every(({ headers }) => headers.get("X-Requested-With") === "airflow-delay")).toBe(true);
});

test("messages that were refused are named with the reason", async () => {
  const refused = [{ id: "b", status: 409, detail: "It is dispatched since 12:00." }];
  fakeApi({ "/actions/cancel": () => result({ changed: 1, refused }) });
  const { user, onClose } = open(CANCEL);
  await user.click(await screen.findByRole("button", { name: "Cancel 2 messages" }));
  expect(await screen.findByText("b: It is dispatched since 12:00.")).toBeVisible();
  expect(screen.getByText("1 message cancelled, 1 not:")).toBeVisible();
  expect(onClose).not.toHaveBeenCalled();
});

test("the second of two people gets a clear answer", async () => {
  fakeApi({ "/actions/cancel": () => problem(409, "Message 'a' is CANCELLED since 12:00.") });
  open({ ...CANCEL, target: { ids: ["a"] } });
  expect(await screen.findByText("Message 'a' is CANCELLED since 12:00.")).toBeVisible();
  expect(screen.getByRole("button", { name: "Cancel" })).toBeDisabled();
});

test("a filter is worked off page by page, all with the same new time", async () => {
  const deliver_at = "2026-11-18T12:00:00Z";
  const calls = fakeApi({
    "/actions/reschedule": ({ body }) => {
      const { dry_run, page } = body as { dry_run: boolean; page?: string };
      const isFirst = !dry_run && page === undefined;
      return result({ matched: 1500, changed: 1000, next: isFirst ? "more" : null, deliver_at, is_exact: false });
    },
  });
  const { user, onClose } = open({ name: "reschedule", target: { filter: { channel: "c" } } });
  await user.clear(await screen.findByLabelText("Delay"));
  expect(screen.getByRole("button", { name: /^Reschedule/ })).toBeDisabled();
  await user.type(screen.getByLabelText("Delay"), "2");
  await user.click(await screen.findByRole("button", { name: "Reschedule at least 1,500 messages" }));
  await waitFor(() => expect(onClose).toHaveBeenCalled());
  expect(bodies(calls).slice(1)).toEqual([
    { filter: { channel: "c" }, dry_run: false, deliver_after: 120, on_past: "deliver" },
    { filter: { channel: "c" }, dry_run: false, page: "more", deliver_at, on_past: "deliver" },
  ]);
});
