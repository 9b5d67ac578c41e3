import { Badge, Flex, Progress, Table, Text } from "@chakra-ui/react";

import type { SparkAttempt, SparkAttempts } from "../api/client";
import { Moment } from "../time/Moment";
import { describeSpan } from "../time/span";

/** The attempts of a Spark job, and how much of its budget they have used. */
export function AttemptList({ history }: { history: SparkAttempts }) {
  if (history.attempts.length === 0) {
    return <Text color="fg.muted">No attempts are recorded.</Text>;
  }
  return (
    <>
      <Flex gap={5} wrap="wrap">
        {Object.entries(history.budget).map(([kind, { used, limit }]) => (
          <Progress.Root key={kind} max={Math.max(limit, 1)} size="xs" value={Math.min(used, limit)} width="10rem">
            <Progress.Label fontSize="xs">
              {kind}: {used} of {limit} used
            </Progress.Label>
            <Progress.Track>
              <Progress.Range />
            </Progress.Track>
          </Progress.Root>
        ))}
      </Flex>
      <Table.ScrollArea whiteSpace="normal">
        <Table.Root size="sm">
          <Table.Caption srOnly>Attempts</Table.Caption>
          <Table.Header>
            <Table.Row>
              <Table.ColumnHeader>Attempt</Table.ColumnHeader>
              <Table.ColumnHeader>Verdict</Table.ColumnHeader>
              <Table.ColumnHeader>Rule and deciding line</Table.ColumnHeader>
              <Table.ColumnHeader display={{ base: "none", md: "table-cell" }}>Started</Table.ColumnHeader>
              <Table.ColumnHeader display={{ base: "none", md: "table-cell" }}>Took</Table.ColumnHeader>
              <Table.ColumnHeader display={{ base: "none", md: "table-cell" }}>Exit code</Table.ColumnHeader>
            </Table.Row>
          </Table.Header>
          <Table.Body>
            {history.attempts.map((attempt) => (
              <AttemptRow attempt={attempt} key={attempt.number} />
            ))}
          </Table.Body>
        </Table.Root>
      </Table.ScrollArea>
    </>
  );
}

function AttemptRow({ attempt }: { attempt: SparkAttempt }) {
  const { started_at, ended_at } = attempt;
  return (
    <Table.Row>
      <Table.Cell>{attempt.number}</Table.Cell>
      <Table.Cell>
        {attempt.verdict === null ? (ended_at === null ? "running" : "succeeded") : <Badge>{attempt.verdict}</Badge>}
      </Table.Cell>
      <Table.Cell overflowWrap="anywhere">
        <Text>{attempt.rule}</Text>
        <Text fontFamily="mono" fontSize="xs">
          {attempt.reason}
        </Text>
      </Table.Cell>
      <Table.Cell display={{ base: "none", md: "table-cell" }}>
        <Moment at={started_at} />
      </Table.Cell>
      <Table.Cell display={{ base: "none", md: "table-cell" }} whiteSpace="nowrap">
        {ended_at === null ? "running" : describeSpan(Date.parse(ended_at) - Date.parse(started_at))}
      </Table.Cell>
      <Table.Cell display={{ base: "none", md: "table-cell" }}>{attempt.exit_code}</Table.Cell>
    </Table.Row>
  );
}
