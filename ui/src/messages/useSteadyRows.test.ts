import { act, renderHook } from "@testing-library/react";

import { useSteadyRows } from "./useSteadyRows";

const rows = (...ids: string[]) => ids.map((id) => ({ id, version: 1 }));

function start(hasSelection = false) {
  return renderHook(({ fresh, list, selected }) => useSteadyRows(fresh, list, selected), {
    initialProps: { fresh: rows("a", "b"), list: "first", selected: hasSelection },
  });
}

test("new rows are shown at once while nobody uses the table", () => {
  const { result, rerender } = start();
  rerender({ fresh: rows("new", "a", "b"), list: "first", selected: false });
  expect(result.current.rows.map(({ id }) => id)).toEqual(["new", "a", "b"]);
  expect(result.current.changes).toBe(0);
});

test("rows stay in place while they are used, and are updated", () => {
  const { result, rerender } = start();
  act(() => result.current.touch(true));
  rerender({ fresh: [{ id: "new", version: 1 }, { id: "b", version: 2 }], list: "first", selected: false });
  expect(result.current.rows).toEqual([{ id: "a", version: 1 }, { id: "b", version: 2 }]);
  expect(result.current.changes).toBe(2);
  act(() => result.current.showChanges());
  expect(result.current.rows.map(({ id }) => id)).toEqual(["new", "b"]);
});

test("a selection keeps rows in place after the pointer has left", () => {
  const { result, rerender } = start();
  act(() => result.current.touch(true));
  rerender({ fresh: rows("a", "b"), list: "first", selected: true });
  act(() => result.current.touch(false));
  rerender({ fresh: rows("c"), list: "first", selected: true });
  expect(result.current.rows.map(({ id }) => id)).toEqual(["a", "b"]);
  rerender({ fresh: rows("c"), list: "first", selected: false });
  expect(result.current.rows.map(({ id }) => id)).toEqual(["c"]);
});

test("another list never shows rows of the last one", () => {
  const { result, rerender } = start();
  act(() => result.current.touch(true));
  rerender({ fresh: rows("x"), list: "second", selected: false });
  expect(result.current.rows.map(({ id }) => id)).toEqual(["x"]);
});

test("rows are the same array as long as nothing changes", () => {
  const { result, rerender } = start();
  const fresh = rows("a");
  rerender({ fresh, list: "first", selected: false });
  act(() => result.current.touch(true));
  const before = result.current.rows;
  rerender({ fresh, list: "first", selected: false });
  expect(result.current.rows).toBe(before);
});
