import { useMemo, useState } from "react";

interface Row {
  id: string;
}

interface SteadyRows<T> {
  rows: T[];
  /** How many rows came or went while the rows are held. */
  changes: number;
  /** The viewer has begun or ended to use the rows. */
  touch: (isTouched: boolean) => void;
  showChanges: () => void;
}

/**
 * Keeps the rows of a table in place while the viewer uses them, so that a refresh moves nothing under the pointer.
 * Held rows are still updated. `list` names the list; rows are never held over from another list.
 */
export function useSteadyRows<T extends Row>(fresh: T[], list: string, hasSelection: boolean): SteadyRows<T> {
  const [isTouched, setIsTouched] = useState(false);
  const [held, setHeld] = useState<{ list: string; rows: T[] } | null>(null);
  const isHeld = held?.list === list && (isTouched || hasSelection);
  // The same array as long as nothing changes, because a table begins again with each new one.
  const rows = useMemo(() => (isHeld ? updateRows(held.rows, fresh) : fresh), [isHeld, held, fresh]);
  return {
    rows,
    changes: isHeld ? countChanges(held.rows, fresh) : 0,
    touch: (touched) => {
      if (touched && !isHeld) {
        setHeld({ list, rows: fresh });
      }
      setIsTouched(touched);
    },
    showChanges: () => setHeld({ list, rows: fresh }),
  };
}

function updateRows<T extends Row>(held: T[], fresh: T[]): T[] {
  const byId = new Map(fresh.map((row) => [row.id, row]));
  return held.map((row) => byId.get(row.id) ?? row);
}

function countChanges(held: Row[], fresh: Row[]): number {
  const before = new Set(held.map((row) => row.id));
  const now = new Set(fresh.map((row) => row.id));
  return [...before].filter((id) => !now.has(id)).length + [...now].filter((id) => !before.has(id)).length;
}
