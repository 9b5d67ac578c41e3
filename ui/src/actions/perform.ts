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

/** Repeats the action until no message of the filter is left. Reports how many are changed so far. */
export async function perform(
  action: Action,
  newTime: NewTime,
  onProgress: (changed: number) => void,
): Promise<ActionResult> {
  let total = await send(action, newTime, false);
  let last = total;
  // An answer that changes nothing ends it, or messages that are refused each time would keep it going.
  while (last.has_more && last.changed > 0) {
    onProgress(total.changed);
    last = await send(action, newTime, false);
    total = { ...last, changed: total.changed + last.changed, refused: [...total.refused, ...last.refused] };
  }
  return total;
}

function send({ name, target, connId, generation }: Action, newTime: NewTime, dry_run: boolean): Promise<ActionResult> {
  const body = { ...target, conn_id: connId, dry_run };
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
