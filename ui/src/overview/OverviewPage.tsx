import { Stack } from "@chakra-ui/react";

import { SeriesCharts, UpcomingChart } from "./Charts";
import { HealthTables, Problems } from "./HealthSections";
import { Tiles } from "./Tiles";

export function OverviewPage() {
  return (
    <Stack gap={6}>
      <Problems />
      <Tiles />
      <UpcomingChart />
      <SeriesCharts />
      <HealthTables />
    </Stack>
  );
}
