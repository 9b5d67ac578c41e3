import { Alert, Grid, Text } from "@chakra-ui/react";

import type { SeriesPoint } from "../api/client";
import { useSeries, useUpcoming } from "../api/queries";
import { Loaded } from "../layout/Loaded";
import { RangeSwitch, useRange } from "../layout/RangeSwitch";
import { Section } from "../layout/Section";
import { describeSpan } from "../time/span";
import { Chart, type Line } from "./Chart";

const COLUMNS = { base: "minmax(0, 1fr)", lg: "repeat(3, minmax(0, 1fr))" };

export function UpcomingChart() {
  const range = useRange("upcoming");
  return (
    <Section controls={<RangeSwitch label="Coming up within" name="upcoming" />} title="Coming up">
      <Loaded isErrorShownElsewhere query={useUpcoming(range)}>
        {({ bins, step_seconds }) => {
          const total = bins.reduce((sum, { count }) => sum + count, 0);
          const most = Math.max(0, ...bins.map(({ count }) => count));
          const step = describeSpan(step_seconds * 1000);
          return (
            <>
              <Text color="fg.muted" fontSize="sm">
                {total.toLocaleString("en")} messages are due, at most {most.toLocaleString("en")} in {step}.
              </Text>
              <Chart
                description={`Scheduled messages by delivery time: ${total} messages, at most ${most} in ${step}`}
                kind="bar"
                lines={[{ label: "due", colour: "blue.solid", values: bins.map(({ count }) => count) }]}
                times={bins.map(({ at }) => at)}
              />
            </>
          );
        }}
      </Loaded>
    </Section>
  );
}

export function SeriesCharts() {
  const range = useRange("range");
  return (
    <Section controls={<RangeSwitch label="Figures of the last" name="range" />} title="Over time">
      <Loaded isErrorShownElsewhere query={useSeries(range)}>
        {({ points }) => (
          <>
            <Early points={points} />
            <Grid gap={6} templateColumns={COLUMNS}>
              <Figure
                description={`Lateness of dispatched messages. ${worstLateness(points)}`}
                format={describeSpan}
                isLogarithmic
                lines={[
                  line("p50", "green.500", points, (point) => atLeastOne(point.lateness?.p50_ms)),
                  line("p95", "orange.500", points, (point) => atLeastOne(point.lateness?.p95_ms)),
                  line("p99", "red.500", points, (point) => atLeastOne(point.lateness?.p99_ms)),
                ]}
                points={points}
                title="Lateness"
              />
              <Figure
                description={`Messages per interval: ${sum(points, "scheduled")} scheduled, ${sum(points, "dispatched")} dispatched, ${sum(points, "cancelled")} cancelled, ${sum(points, "dead")} dead`}
                lines={[
                  line("scheduled", "blue.500", points, (point) => point.scheduled),
                  line("dispatched", "green.500", points, (point) => point.dispatched),
                  line("cancelled", "gray.500", points, (point) => point.cancelled),
                  line("dead", "red.500", points, (point) => point.dead),
                ]}
                points={points}
                title="Throughput"
              />
              <Figure
                description={`Scheduled messages over time, last ${points.at(-1)?.depth ?? "unknown"}`}
                lines={[line("scheduled", "blue.500", points, (point) => point.depth)]}
                points={points}
                title="Scheduled messages"
              />
            </Grid>
          </>
        )}
      </Loaded>
    </Section>
  );
}

/** A message that is dispatched too early is a defect, such as a wrong clock; it must not go unseen. */
function Early({ points }: { points: SeriesPoint[] }) {
  const early = sum(points, "early");
  return early === 0 ? null : (
    <Alert.Root mb={3} size="sm" status="error">
      <Alert.Indicator />
      <Alert.Title>{early.toLocaleString("en")} messages were dispatched before their delivery time.</Alert.Title>
    </Alert.Root>
  );
}

interface FigureProps {
  title: string;
  description: string;
  points: SeriesPoint[];
  lines: Line[];
  format?: (value: number) => string;
  isLogarithmic?: boolean;
}

function Figure({ title, points, ...chart }: FigureProps) {
  return (
    <figure>
      <Text asChild fontSize="sm" fontWeight="semibold">
        <figcaption>{title}</figcaption>
      </Text>
      <Chart {...chart} kind="line" times={points.map(({ at }) => at)} />
    </figure>
  );
}

function line(label: string, colour: string, points: SeriesPoint[], value: (point: SeriesPoint) => number | null): Line {
  return { label, colour, values: points.map(value) };
}

/** A logarithmic scale has no zero. */
function atLeastOne(ms: number | undefined): number | null {
  return ms === undefined ? null : Math.max(1, ms);
}

function sum(points: SeriesPoint[], name: "scheduled" | "dispatched" | "cancelled" | "dead" | "early"): number {
  return points.reduce((total, point) => total + point[name], 0);
}

function worstLateness(points: SeriesPoint[]): string {
  const worst = Math.max(...points.map(({ lateness }) => lateness?.p99_ms ?? -1));
  return worst < 0 ? "None was dispatched." : `The worst p99 is ${describeSpan(worst)}.`;
}
