import { Badge } from "@chakra-ui/react";

import type { StateName } from "../api/client";

const PALETTES: Record<StateName, string> = {
  SCHEDULED: "blue",
  DISPATCHED: "green",
  CANCELLED: "gray",
  DEAD: "red",
};

export function StateBadge({ state }: { state: StateName }) {
  return (
    <Badge colorPalette={PALETTES[state]} variant="surface">
      {state.toLowerCase()}
    </Badge>
  );
}
