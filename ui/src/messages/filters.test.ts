import { changeFilters, hasFilters, NO_FILTERS, readFilters, toActionFilter } from "./filters";

test("filters are read from the address bar", () => {
  const params = new URLSearchParams("state=DEAD&state=SCHEDULED&channel=a%26b&search=x&due_from=2026-01-01T00:00:00Z");
  expect(readFilters(params)).toEqual({
    state: ["SCHEDULED", "DEAD"],
    channel: "a&b",
    search: "x",
    due_from: "2026-01-01T00:00:00Z",
  });
});

test("values that mean nothing are ignored", () => {
  expect(readFilters(new URLSearchParams("state=LOST&channel=&due_to=soon"))).toEqual({ state: [] });
});

test("a changed filter goes back to the first page and keeps everything else", () => {
  const params = new URLSearchParams("conn_id=team_a&page=token&channel=a&state=DEAD");
  const changed = changeFilters(params, { channel: "b", search: "", state: ["SCHEDULED", "DEAD"] });
  expect(changed.toString()).toBe("conn_id=team_a&channel=b&state=SCHEDULED&state=DEAD");
});

test("clearing removes all filters but not the ledger", () => {
  expect(changeFilters(new URLSearchParams("conn_id=team_a&state=DEAD&dag_id=d&page=p"), NO_FILTERS).toString()).toBe("conn_id=team_a");
});

test("a bulk action gets the filters without the state", () => {
  const filters = readFilters(new URLSearchParams("state=SCHEDULED&dag_id=d"));
  expect(hasFilters(filters)).toBe(true);
  expect(toActionFilter(filters)).toEqual({ dag_id: "d" });
});
