import type { MessageFilter, StateName } from "../api/client";

export const STATES: StateName[] = ["SCHEDULED", "DISPATCHED", "CANCELLED", "DEAD"];

export const TEXT_FILTERS = [
  "search",
  "channel",
  "connection",
  "dag_id",
  "run_id",
  "task_id",
  "due_from",
  "due_to",
] as const;
export type TextFilter = (typeof TEXT_FILTERS)[number];

/** The filters of a list, as the address bar has them. */
export type Filters = { state: StateName[] } & Partial<Record<TextFilter, string>>;

export function readFilters(params: URLSearchParams): Filters {
  const filters: Filters = { state: STATES.filter((state) => params.getAll("state").includes(state)) };
  for (const name of TEXT_FILTERS) {
    const value = params.get(name);
    if (value !== null && value !== "" && !(name.startsWith("due_") && Number.isNaN(Date.parse(value)))) {
      filters[name] = value;
    }
  }
  return filters;
}

/** Returns the address bar's parameters with changed filters; the list starts again at its first page. */
export function changeFilters(params: URLSearchParams, changes: Partial<Filters>): URLSearchParams {
  const changed = new URLSearchParams(params);
  changed.delete("page");
  for (const [name, value] of Object.entries(changes)) {
    changed.delete(name);
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each) {
        changed.append(name, each);
      }
    }
  }
  return changed;
}

export const NO_FILTERS: Filters = { ...Object.fromEntries(TEXT_FILTERS.map((name) => [name, ""])), state: [] };

export function hasFilters({ state, ...texts }: Filters): boolean {
  return state.length > 0 || Object.keys(texts).length > 0;
}

/** Returns the filter of a bulk action. It has no state, because an action changes messages of one state only. */
export function toActionFilter({ state, ...texts }: Filters): MessageFilter {
  return texts;
}
