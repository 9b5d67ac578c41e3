import "@testing-library/jest-dom/vitest";

import { cleanup, configure } from "@testing-library/react";
import { afterEach } from "vitest";

import { toaster } from "../actions/toaster";
import { queryClient } from "../api/queries";

// A busy machine needs more than the usual second.
configure({ asyncUtilTimeout: 10_000 });
queryClient.setDefaultOptions({ queries: { retry: false, refetchInterval: false } });

afterEach(() => {
  cleanup();
  queryClient.clear();
  toaster.remove();
  localStorage.clear();
});
