const UNITS: [name: string, ms: number][] = [
  ["d", 86_400_000],
  ["h", 3_600_000],
  ["min", 60_000],
  ["s", 1000],
];

/** Returns a duration in its two largest units, such as "2 h 5 min". */
export function describeSpan(ms: number): string {
  let rest = Math.abs(ms);
  const parts: string[] = [];
  for (const [name, size] of UNITS) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count > 0) {
      parts.push(`${count} ${name}`);
    } else if (parts.length > 0) {
      break;
    }
  }
  return parts.slice(0, 2).join(" ") || `${Math.round(rest)} ms`;
}

/** Returns a time relative to now, such as "in 1 h" or "5 s ago". */
export function describeDistance(at: number, now: number): string {
  if (Math.abs(at - now) < 1000) {
    return "now";
  }
  return at > now ? `in ${describeSpan(at - now)}` : `${describeSpan(now - at)} ago`;
}
