import { useSyncExternalStore } from "react";

/** HTTP dates have no fractions of a second, so smaller differences mean nothing. */
const TOLERANCE_MS = 2000;

let offsetMs = 0;
let timer: number | undefined;
const listeners = new Set<() => void>();

/** Corrects countdowns where the clock of the viewer is wrong. */
export function noteServerTime(date: string | null): void {
  const difference = Date.parse(date ?? "") - Date.now();
  if (!Number.isNaN(difference)) {
    offsetMs = Math.abs(difference) < TOLERANCE_MS ? 0 : difference;
  }
}

export function serverNow(): number {
  return Date.now() + offsetMs;
}

/** Returns the server's time in milliseconds, and renders again each second. */
export function useNow(): number {
  return useSyncExternalStore(subscribe, () => Math.floor(serverNow() / 1000) * 1000);
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  timer ??= window.setInterval(() => listeners.forEach((each) => each()), 1000);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0) {
      window.clearInterval(timer);
      timer = undefined;
    }
  };
}
