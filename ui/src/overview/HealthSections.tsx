import { Alert, Badge, Grid, Stack, Table, Text } from "@chakra-ui/react";
import type { ReactNode } from "react";

import type { BrokerStatus, DispatcherStatus, HealthProblem } from "../api/client";
import { useHealth } from "../api/queries";
import { Loaded } from "../layout/Loaded";
import { Section } from "../layout/Section";
import { CircuitText } from "../retries/CircuitText";
import { Distance } from "../time/Countdown";
import { describeSpan } from "../time/span";

const PALETTES: Record<DispatcherStatus["status"], string> = {
  alive: "green",
  unwell: "orange",
  stopped: "gray",
  gone: "red",
};
const COLUMNS = { base: "minmax(0, 1fr)", xl: "minmax(0, 1fr) minmax(0, 1fr)" };

/** What needs attention, and what to do about it. */
export function Problems() {
  return (
    <Loaded isErrorShownElsewhere query={useHealth()}>
      {({ problems }) => (
        <Stack aria-label="Problems" aria-live="polite" gap={2} role="region">
          {problems.length === 0 ? (
            <Alert.Root size="sm" status="success">
              <Alert.Indicator />
              <Alert.Title>Everything works: no problem is known.</Alert.Title>
            </Alert.Root>
          ) : (
            problems.map((problem) => <ProblemAlert key={`${problem.subject} ${problem.text}`} problem={problem} />)
          )}
        </Stack>
      )}
    </Loaded>
  );
}

function ProblemAlert({ problem }: { problem: HealthProblem }) {
  return (
    <Alert.Root size="sm" status={problem.severity}>
      <Alert.Indicator />
      <Alert.Content>
        <Alert.Title>{problem.text}</Alert.Title>
        <Alert.Description overflowWrap="anywhere">{problem.remedy}</Alert.Description>
      </Alert.Content>
    </Alert.Root>
  );
}

/** Dispatchers, brokers, clusters and clocks. */
export function HealthTables() {
  const { data } = useHealth();
  if (data === undefined) {
    return null;
  }
  return (
    <Grid gap={6} templateColumns={COLUMNS}>
      <Section title="Dispatchers">
        <Dispatchers dispatchers={data.dispatchers} />
      </Section>
      <Section title="Brokers">
        <Brokers brokers={data.brokers} />
      </Section>
      {data.circuits.length > 0 && (
        <Section title="Spark clusters">
          {data.circuits.map((circuit) => (
            <CircuitText circuit={circuit} key={circuit.cluster} />
          ))}
        </Section>
      )}
      <Section title="Clock">
        <Text fontSize="sm">The clock of this API server is {describeSkew(data.api_clock_skew_ms)}.</Text>
      </Section>
    </Grid>
  );
}

function Dispatchers({ dispatchers }: { dispatchers: DispatcherStatus[] }) {
  if (dispatchers.length === 0) {
    return <Text color="fg.muted">No dispatcher has reported to this ledger yet.</Text>;
  }
  return (
    <HealthTable columns={["Dispatcher", "Status", "Loops"]}>
      {dispatchers.map((dispatcher) => (
        <Table.Row key={dispatcher.name}>
          <Table.Cell overflowWrap="anywhere" verticalAlign="top">
            <Text>{dispatcher.name}</Text>
            <Text color="fg.muted" fontSize="xs">
              {dispatcher.host}, process {dispatcher.pid}, version {dispatcher.version}
            </Text>
            {dispatcher.clock_skew_ms !== null && (
              <Text color="fg.muted" fontSize="xs">
                clock {describeSkew(dispatcher.clock_skew_ms)}
              </Text>
            )}
          </Table.Cell>
          <Table.Cell verticalAlign="top">
            <Badge colorPalette={PALETTES[dispatcher.status]} variant="surface">
              {dispatcher.status}
            </Badge>
            <Text color="fg.muted" fontSize="xs">
              seen <Distance at={dispatcher.seen_at} />
            </Text>
          </Table.Cell>
          <Table.Cell verticalAlign="top">
            {dispatcher.loops.map(({ name, is_healthy, last_success_at, error, lag_ms }) => (
              <Text fontSize="xs" key={name} overflowWrap="anywhere">
                {name}: {is_healthy ? "works" : "fails"}
                {last_success_at !== null && (
                  <>
                    , last success <Distance at={last_success_at} />
                  </>
                )}
                {lag_ms !== null && lag_ms >= 1000 && `, ${describeSpan(lag_ms)} behind`}
                {error !== null && `, ${error}`}
              </Text>
            ))}
          </Table.Cell>
        </Table.Row>
      ))}
    </HealthTable>
  );
}

function Brokers({ brokers }: { brokers: BrokerStatus[] }) {
  if (brokers.length === 0) {
    return <Text color="fg.muted">No dispatcher has checked a broker yet.</Text>;
  }
  return (
    <HealthTable columns={["Connection", "Status", "Topology"]}>
      {brokers.map((broker) => (
        <Table.Row key={broker.connection}>
          <Table.Cell overflowWrap="anywhere" verticalAlign="top">
            <Text>{broker.connection}</Text>
            <Text color="fg.muted" fontSize="xs">
              {broker.description}
            </Text>
            {broker.clock_skew_ms !== null && (
              <Text color="fg.muted" fontSize="xs">
                clock {describeSkew(broker.clock_skew_ms)}
              </Text>
            )}
          </Table.Cell>
          <Table.Cell overflowWrap="anywhere" verticalAlign="top">
            <Badge colorPalette={broker.is_reachable ? "green" : "red"} variant="surface">
              {broker.is_reachable ? "reachable" : "unreachable"}
            </Badge>
            <Text color="fg.muted" fontSize="xs">
              checked <Distance at={broker.checked_at} />
            </Text>
            <Text fontSize="xs">{broker.error}</Text>
          </Table.Cell>
          <Table.Cell overflowWrap="anywhere" verticalAlign="top">
            {broker.topology_verified_at === null ? (
              <Text color="fg.muted" fontSize="xs">
                not verified
              </Text>
            ) : (
              <Text fontSize="xs">
                verified <Distance at={broker.topology_verified_at} />
              </Text>
            )}
            {broker.topology_issues.map(({ text, is_problem }) => (
              <Text color={is_problem ? "fg.error" : "fg.muted"} fontSize="xs" key={text}>
                {text}
              </Text>
            ))}
          </Table.Cell>
        </Table.Row>
      ))}
    </HealthTable>
  );
}

function HealthTable({ columns, children }: { columns: string[]; children: ReactNode }) {
  return (
    <Table.ScrollArea whiteSpace="normal">
      <Table.Root size="sm">
        <Table.Header>
          <Table.Row>
            {columns.map((name) => (
              <Table.ColumnHeader key={name}>{name}</Table.ColumnHeader>
            ))}
          </Table.Row>
        </Table.Header>
        <Table.Body>{children}</Table.Body>
      </Table.Root>
    </Table.ScrollArea>
  );
}

/** Describes the difference of a clock to that of the database. */
function describeSkew(ms: number): string {
  return Math.abs(ms) < 100 ? "right" : `${describeSpan(ms)} ${ms > 0 ? "ahead" : "behind"}`;
}
