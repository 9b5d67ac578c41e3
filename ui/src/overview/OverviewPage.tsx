import { Stack } from "@chakra-ui/react";

import { useCounts, useHealth, useSeries, useUpcoming } from "../api/queries";
import { ErrorState } from "../layout/ErrorState";
import { useRange } from "../layout/RangeSwitch";
import { SeriesCharts, UpcomingChart } from "./Charts";
import { HealthTables, Problems } from "./HealthSections";
import { Tiles } from "./Tiles";

export function OverviewPage() {
  return (
    <Stack gap={6}>
      <Errors />
      <Problems />
      <Tiles />
      <UpcomingChart />
      <SeriesCharts />
      <HealthTables />
    </Stack>
  );
}

/** Says once why parts of the page could not be read. */
function Errors() {
  const queries = [useHealth(), useCounts(), useUpcoming(useRange("upcoming")), useSeries(useRange("range"))];
  const errors = new Map(queries.flatMap(({ error }) => (error === null ? [] : [[error.message, error] as const])));
  return [...errors].map(([message, error]) => <ErrorState error={error} key={message} />);
}
