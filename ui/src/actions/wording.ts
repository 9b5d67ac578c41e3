import type { ActionResult } from "../api/client";

export type ActionName = ActionResult["action"];

/** How a dialog speaks of an action on a number of things. */
export interface Wording {
  /** On the button that opens the dialog, and in its title. */
  name: string;
  /** What happens to them. */
  effect: string;
  /** On the button that confirms, with a count before it. */
  confirm: string;
  done: string;
  thing: [one: string, many: string];
  isDestructive: boolean;
}

const MESSAGE: [string, string] = ["message", "messages"];
const JOB: [string, string] = ["Spark job", "Spark jobs"];

export const WORDINGS: Record<ActionName, Wording> = {
  cancel: {
    name: "Cancel",
    effect: "A cancelled message is never dispatched.",
    confirm: "Cancel",
    done: "cancelled",
    thing: MESSAGE,
    isDestructive: true,
  },
  expedite: {
    name: "Expedite",
    effect: "An expedited message is due now.",
    confirm: "Expedite",
    done: "expedited",
    thing: MESSAGE,
    isDestructive: false,
  },
  reschedule: {
    name: "Reschedule",
    effect: "A rescheduled message gets a new delivery time.",
    confirm: "Reschedule",
    done: "rescheduled",
    thing: MESSAGE,
    isDestructive: false,
  },
  replay: {
    name: "Replay",
    effect: "A replayed dead letter is sent to its channel again.",
    confirm: "Replay",
    done: "replayed",
    thing: ["dead letter", "dead letters"],
    isDestructive: false,
  },
};

export const RETRY_NOW: Wording = {
  name: "Retry now",
  effect: "The job is submitted as soon as its cluster and the rate limit admit it.",
  confirm: "Retry",
  done: "released",
  thing: JOB,
  isDestructive: false,
};

export const GIVE_UP: Wording = {
  name: "Give up",
  effect: "The job is not submitted again, and its task fails.",
  confirm: "Give up",
  done: "given up",
  thing: JOB,
  isDestructive: true,
};

/** Returns "1 message", "12 messages" or "at least 1,000 messages". */
export function countOf({ thing }: Wording, count: number, isExact = true): string {
  return `${isExact ? "" : "at least "}${count.toLocaleString("en")} ${count === 1 ? thing[0] : thing[1]}`;
}
