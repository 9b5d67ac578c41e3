import "@testing-library/jest-dom/vitest";

import { cleanup } from "@testing-library/react";
import { afterEach } from "vitest";

import { toaster } from "../actions/toaster";
import { queryClient } from "../api/queries";

queryClient.setDefaultOptions({ queries: { retry: false, refetchInterval: false } });

afterEach(() => {
  cleanup();
  queryClient.clear();
  toaster.remove();
  localStorage.clear();
});
