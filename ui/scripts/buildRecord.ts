import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";
import { gzipSync } from "node:zlib";

import type { Plugin } from "vite";

const NOT_PART_OF_THE_BUILD = new Set(["node_modules", "README.md"]);

/** Writes build.json, by which tests/unit/test_ui_bundle.py knows that the bundle was built from these sources. */
export function buildRecord(root: string): Plugin {
  return {
    name: "build-record",
    apply: "build",
    writeBundle({ dir = "" }) {
      const files: Record<string, string> = {};
      for (const path of listFiles(dir)) {
        const content = readFileSync(path);
        files[nameIn(dir, path)] = sha256(content);
        this.info(`${nameIn(dir, path)}: ${(gzipSync(content).length / 1000).toFixed(1)} kB gzipped`);
      }
      const record = { sources: hashOfSources(root), files };
      writeFileSync(join(dir, "build.json"), `${JSON.stringify(record, null, 2)}\n`);
    },
  };
}

/** Hashes "<path>\0<hash of the content>\n" of every file, sorted by path. */
function hashOfSources(root: string): string {
  const lines = listFiles(root).map((path) => `${nameIn(root, path)}\0${sha256(readFileSync(path))}\n`);
  return sha256(lines.sort().join(""));
}

function listFiles(folder: string): string[] {
  return readdirSync(folder, { withFileTypes: true })
    .filter((entry) => !NOT_PART_OF_THE_BUILD.has(entry.name))
    .flatMap((entry) => {
      const path = join(folder, entry.name);
      return entry.isDirectory() ? listFiles(path) : [path];
    });
}

function nameIn(folder: string, path: string): string {
  return relative(folder, path).split(sep).join("/");
}

function sha256(content: string | Uint8Array): string {
  return createHash("sha256").update(content).digest("hex");
}
