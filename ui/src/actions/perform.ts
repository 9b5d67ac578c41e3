import { type ActionResult, client, type MessageFilter, unwrap } from "../api/client";
import type { ActionName } from "./wording";

/** The messages that an action changes: by id, or all that match a filter. */
export type Target = { ids: string[] } | { filter: MessageFilter };

export type NewTime = { deliver_at: string } | { deliver_after: number };

export interface Action {
  name: ActionName;
  target: Target;
  connId?: string;
  /** What the viewer saw; refuses to reschedule a message that has changed since. */
  generation?: number;
}

/** Counts the messages that the action would change. */
export function count(action: Action, newTime: NewTime): Promise<ActionResult> {
  return send(action, newTime, true);
}

/** Performs the action on all pages of the filter. Reports how many are changed so far. */
export async function perform(
  action: Action,
  newTime: NewTime,
  onProgress: (changed: number) => void,
): Promise<ActionResult> {
  let total = await send(action, newTime, false);
  while (total.next !== null) {
    onProgress(total.changed);
    // All get the same time, however long it takes.
    const sameTime = total.deliver_at === null ? newTime : { deliver_at: total.deliver_at };
    const more = await send(action, sameTime, false, total.next);
    total = { ...more, changed: total.changed + more.changed, refused: [...total.refused, ...more.refused] };
  }
  return total;
}

function send(action: Action, newTime: NewTime, dry_run: boolean, page?: string): Promise<ActionResult> {
  const { name, target, connId, generation } = action;
  const body = { ...target, conn_id: connId, dry_run, page };
  switch (name) {
    case "cancel":
      return unwrap(client.POST("/v1/actions/cancel", { body }));
    case "expedite":
      return unwrap(client.POST("/v1/actions/expedite", { body }));
    case "replay":
      return unwrap(client.POST("/v1/actions/replay", { body }));
    case "reschedule":
      return unwrap(client.POST("/v1/actions/reschedule", { body: { ...body, ...newTime, generation, on_past: "deliver" } }));
  }
}
