import type { PayloadPreview } from "../api/client";

const BYTES_PER_LINE = 16;

/** Returns the shown bytes of a payload. */
export function bytesOf({ format, content }: PayloadPreview): Uint8Array {
  return format === "base64"
    ? Uint8Array.from(atob(content ?? ""), (character) => character.charCodeAt(0))
    : new TextEncoder().encode(content ?? "");
}

/** Returns lines of offset, bytes and printable characters, as hexdump writes them. */
export function hexDump(bytes: Uint8Array): string {
  const lines: string[] = [];
  for (let offset = 0; offset < bytes.length; offset += BYTES_PER_LINE) {
    const line = [...bytes.subarray(offset, offset + BYTES_PER_LINE)];
    const hex = line.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const text = line.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    lines.push(`${offset.toString(16).padStart(8, "0")}  ${hex.padEnd(BYTES_PER_LINE * 3 - 1)}  ${text}`);
  }
  return lines.join("\n");
}

/** Returns indented JSON, or null if the text is none, such as the beginning of a long one. */
export function prettyJson(text: string): string | null {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}
