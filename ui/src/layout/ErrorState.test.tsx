import { screen } from "@testing-library/react";

import { ApiError } from "../api/client";
import { show } from "../testing/show";
import { ErrorState } from "./ErrorState";

test("a problem is shown in the words of the API", () => {
  show(<ErrorState error={new ApiError(503, "Service Unavailable", "The ledger is locked; try again.")} />);
  expect(screen.getByRole("alert")).toHaveTextContent("Service UnavailableThe ledger is locked; try again.");
});

test("a signed-out user can sign in and come back", () => {
  show(<ErrorState error={new ApiError(401, "Unauthorized", "Sign in.")} />);
  expect(screen.getByText("You are signed out")).toBeVisible();
  const link = screen.getByRole<HTMLAnchorElement>("link", { name: "Sign in" });
  expect(new URL(link.href).searchParams.get("next")).toBe(location.href);
});

test("a missing permission is named", () => {
  show(<ErrorState error={new ApiError(403, "Forbidden", "You may not read this DAG.")} />);
  expect(screen.getByText("You may not see this")).toBeVisible();
  expect(screen.getByText("You may not read this DAG.")).toBeVisible();
});
