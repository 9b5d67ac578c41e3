import { resolve } from "node:path";

import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

import { buildRecord } from "./scripts/buildRecord.ts";

const root = import.meta.dirname;

/** What Airflow's UI shares with plugins: module to the name of the global variable. */
const sharedByAirflow = {
  "@chakra-ui/react": "ChakraUI",
  react: "React",
  "react-dom": "ReactDOM",
  "react-router-dom": "ReactRouterDOM",
  "react/jsx-runtime": "ReactJSXRuntime",
};

export default defineConfig({
  root,
  define: { "process.env.NODE_ENV": JSON.stringify(process.env.VITEST ? "test" : "production") },
  plugins: [react(), buildRecord(root)],
  publicDir: "icons",
  build: {
    outDir: resolve(root, "../airflow_delay_provider/ui/dist"),
    emptyOutDir: true,
    target: "es2022",
    reportCompressedSize: false,
    lib: { entry: resolve(root, "src/main.tsx"), formats: ["iife"], name: "DelayedMessages", fileName: () => "main.js" },
    rolldownOptions: {
      external: Object.keys(sharedByAirflow),
      output: { globals: sharedByAirflow },
    },
  },
  test: {
    environment: "happy-dom",
    globals: true,
    setupFiles: "src/testing/setup.ts",
    restoreMocks: true,
    testTimeout: 30_000,
  },
});
