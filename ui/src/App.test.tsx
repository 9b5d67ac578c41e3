import { screen, waitFor } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import axe from "axe-core";

import { App } from "./App";
import { fakeApi, problem } from "./testing/fakeApi";
import { detail, pageOf, summary } from "./testing/messages";
import { show } from "./testing/show";

const HOME = "/plugin/delayed-messages";
const channels = () => ({ body: { channels: [], next: null } });

test("filters go into the address bar, and the list follows", async () => {
  const calls = fakeApi({ "/messages": () => ({ body: pageOf([summary()], { next: "token2" }) }), "/channels": channels });
  show(<App />, `${HOME}/messages?conn_id=team_a`);
  const user = userEvent.setup();
  await user.click(await screen.findByRole("button", { name: "dead" }));
  await user.type(screen.getByLabelText("Text in the id"), "order");
  await waitFor(() =>
    expect(screen.getByTestId("address")).toHaveTextContent(`${HOME}/messages?conn_id=team_a&state=DEAD&search=order`),
  );
  await user.click(await screen.findByRole("button", { name: "Next" }));
  await waitFor(() => {
    const query = calls.filter(({ path }) => path === "/messages").at(-1)?.query;
    expect(query?.toString()).toBe("conn_id=team_a&state=DEAD&search=order&page=token2");
  });
  await user.click(screen.getByRole("button", { name: "Clear filters" }));
  expect(screen.getByTestId("address")).toHaveTextContent(/^\/plugin\/delayed-messages\/messages\?conn_id=team_a$/);
  expect(screen.getByLabelText("Text in the id")).toHaveValue("");
});

test("selected messages can be changed", async () => {
  fakeApi({
    "/messages": () => ({ body: pageOf([summary({ id: "one" }), summary({ id: "two", can_edit: false })]) }),
    "/channels": channels,
  });
  show(<App />, `${HOME}/messages`);
  const user = userEvent.setup();
  await user.click(await screen.findByLabelText("Select one"));
  expect(screen.getByText("1 selected:")).toBeVisible();
  expect(screen.getByRole("button", { name: "Expedite" })).toBeVisible();
  expect(screen.getByLabelText("Select two")).toBeDisabled();
});

test("a viewer sees messages but no actions", async () => {
  fakeApi({ "/messages": () => ({ body: pageOf([summary({ can_edit: false })]) }), "/channels": channels });
  show(<App />, `${HOME}/messages`);
  expect(await screen.findByRole("link", { name: "order/1" })).toHaveAttribute("href", `${HOME}/messages/order%2F1`);
  expect(screen.queryByRole("checkbox")).not.toBeInTheDocument();
  expect(screen.queryByText(/Select all/)).not.toBeInTheDocument();
});

test("a list of messages that cannot be changed offers no change of all", async () => {
  fakeApi({ "/messages": () => ({ body: pageOf([summary({ state: "DISPATCHED" })]) }), "/channels": channels });
  show(<App />, `${HOME}/messages?state=DISPATCHED`);
  await screen.findByRole("link", { name: "order/1" });
  expect(screen.queryByText(/Select all/)).not.toBeInTheDocument();
});

test("empty lists say what would be there", async () => {
  fakeApi({ "/messages": () => ({ body: pageOf([]) }), "/channels": channels });
  show(<App />, `${HOME}/messages`);
  expect(await screen.findByText("No messages yet")).toBeVisible();
});

test("an empty list says when messages of its connection are not listed at all", async () => {
  const notice = "To list them, run `airflow delay dispatcher --index rabbit`.";
  fakeApi({ "/messages": () => ({ body: pageOf([], { notice }) }), "/channels": channels });
  show(<App />, `${HOME}/messages?conn_id=rabbit&task_id=remind`);
  expect(await screen.findByText(notice)).toBeVisible();
  expect(screen.queryByText("No message matches these filters")).not.toBeInTheDocument();
});

test.each(["messages", "dead-letters"])("a search of %s that has found nothing yet goes on by itself", async (list) => {
  const dead = { ...summary(), reason: "too large", died_at: "2026-01-01T00:00:00Z" };
  const unfinished = pageOf([], { next: "token2", continuation: "token2" });
  const calls = fakeApi({
    [`/${list}`]: ({ query }) => ({ body: query.get("page") === "token2" ? pageOf([dead]) : unfinished }),
    "/channels": channels,
  });
  show(<App />, `${HOME}/${list}?search=order`);
  expect(await screen.findByRole("link", { name: "order/1" })).toBeVisible();
  const pages = calls.filter(({ path }) => path === `/${list}`).map(({ query }) => query.get("page"));
  expect(pages).toEqual([null, "token2"]);
});

test.each(["messages", "dead-letters", "retries"])("a long search of %s is not taken for an empty list", async (list) => {
  const unfinished = pageOf([], { next: "more", continuation: "more" });
  const calls = fakeApi({
    [`/${list}`]: () => ({ body: { ...unfinished, retries: [] } }),
    "/channels": channels,
    "/health": () => problem(503, ""),
  });
  show(<App />, `${HOME}/${list}?search=order`);
  expect(await screen.findByText("Not all messages are searched yet.")).toBeVisible();
  expect(screen.queryByText(/^No /)).not.toBeInTheDocument();
  const read = calls.filter(({ path }) => path === `/${list}`).length;
  expect(read).toBeGreaterThan(10);
  await userEvent.setup().click(screen.getByRole("button", { name: "Continue the search" }));
  await waitFor(() => expect(screen.getByTestId("address")).toHaveTextContent("page=more"));
});

test("a message with a slash in its id is shown with its actions and no serious violation", async () => {
  const calls = fakeApi({
    "/messages/order/1": () => ({ body: detail({ warning: "No dispatcher runs." }) }),
    "/history/order/1": () => ({
      body: {
        message_id: "order/1",
        omitted: 0,
        entries: [
          {
            change: "scheduled",
            state: "SCHEDULED",
            at: "2026-01-01T00:00:00Z",
            deliver_at: "2126-01-01T00:00:00Z",
            channel: "reminders",
            reason: null,
          },
        ],
      },
    }),
  });
  const { container } = show(<App />, `${HOME}/messages/order%2F1?conn_id=team_a`);
  expect(await screen.findByText("No dispatcher runs.")).toBeVisible();
  expect(await screen.findByText("scheduled", { selector: "[class*=timeline]" })).toBeVisible();
  expect(calls[0]?.query.get("conn_id")).toBe("team_a");
  expect(screen.getByRole("link", { name: "Download" })).toHaveAttribute(
    "href",
    expect.stringMatching(/\/delay\/v1\/payload\/order%2F1\?conn_id=team_a$/),
  );
  for (const name of ["Cancel", "Reschedule", "Expedite"]) {
    expect(screen.getByRole("button", { name })).toBeEnabled();
  }
  const { violations } = await axe.run(container, { rules: { "color-contrast": { enabled: false } } });
  expect(violations.filter(({ impact }) => impact === "serious" || impact === "critical")).toEqual([]);
});

test("an unknown message is an error in the words of the API", async () => {
  fakeApi({ "/messages/gone": () => problem(404, "The ledger has no message 'gone'."), "/history/gone": () => problem(404, "") });
  show(<App />, `${HOME}/messages/gone`);
  expect(await screen.findByText("The ledger has no message 'gone'.")).toBeVisible();
});

test("the tab of a task shows only messages of that task instance", async () => {
  const calls = fakeApi({
    "/messages": () => ({ body: pageOf([summary()]) }),
    "/retries": () => ({ body: { ...pageOf([]), retries: [] } }),
    "/attempts": () => ({ body: { phase: null, attempts: [], budget: {} } }),
  });
  show(<App dagId="d" mapIndex="3" runId="r" taskId="t" />);
  expect(await screen.findByRole("link", { name: "order/1" })).toBeVisible();
  for (const { query } of calls) {
    expect(Object.fromEntries(query)).toEqual({ dag_id: "d", run_id: "r", task_id: "t", map_index: "3" });
  }
});

test("a signed-out user reads so once on the overview", async () => {
  const signedOut = () => problem(401, "Sign in to Airflow.");
  fakeApi({ "/counts": signedOut, "/health": signedOut, "/series": signedOut, "/upcoming": signedOut });
  show(<App />);
  expect(await screen.findByText("You are signed out")).toBeVisible();
  expect(screen.getAllByRole("alert")).toHaveLength(1);
});
