/** Returns the time zone that the viewer chose in Airflow, else that of the browser. */
export function viewerZone(): string {
  const browser = Intl.DateTimeFormat().resolvedOptions().timeZone;
  try {
    const chosen: unknown = JSON.parse(localStorage.getItem("timezone") ?? "null");
    return typeof chosen === "string" ? Intl.DateTimeFormat("en", { timeZone: chosen }).resolvedOptions().timeZone : browser;
  } catch {
    return browser;
  }
}

/** Returns "2026-11-18 17:45:10", as Airflow writes times. */
export function formatInZone(at: Date, timeZone: string): string {
  // Sweden writes dates so.
  return at.toLocaleString("sv-SE", { timeZone });
}

export function formatUtc(at: Date): string {
  return at.toISOString().replace("T", " ").replace("Z", " UTC");
}

/** Returns the value of an <input type="datetime-local">. */
export function toInput(iso: string, timeZone: string): string {
  return formatInZone(new Date(iso), timeZone).replace(" ", "T").slice(0, 16);
}

/** Reads an <input type="datetime-local">, whose time is one of the viewer's zone. */
export function fromInput(value: string, timeZone: string): string {
  const asUtc = new Date(`${value}Z`).getTime();
  // The second step corrects times near a change of the zone's offset.
  const guess = asUtc - offsetAt(asUtc, timeZone);
  return new Date(asUtc - offsetAt(guess, timeZone)).toISOString();
}

function offsetAt(at: number, timeZone: string): number {
  const seconds = Math.floor(at / 1000) * 1000;
  return new Date(`${formatInZone(new Date(seconds), timeZone).replace(" ", "T")}Z`).getTime() - seconds;
}
