import { Alert, Button, Clipboard, DataList, Flex, Grid, Heading, IconButton, Stack, Table, Text } from "@chakra-ui/react";
import { type ReactNode, useState } from "react";
import { useParams } from "react-router-dom";

import { ActionDialog } from "../actions/ActionDialog";
import { type ActionName, WORDINGS } from "../actions/wording";
import type { MessageDetail } from "../api/client";
import { useConnId, useMessage } from "../api/queries";
import { Loaded } from "../layout/Loaded";
import { Section } from "../layout/Section";
import { StateBadge } from "../layout/StateBadge";
import { TaskLink } from "../layout/TaskLink";
import { Countdown, Distance } from "../time/Countdown";
import { Moment } from "../time/Moment";
import { describeSpan } from "../time/span";
import { HistoryTimeline } from "./HistoryTimeline";
import { PayloadViewer } from "./PayloadViewer";

export function MessagePage() {
  const { messageId = "" } = useParams();
  return <Loaded query={useMessage(messageId)}>{(message) => <MessageView message={message} />}</Loaded>;
}

function MessageView({ message }: { message: MessageDetail }) {
  return (
    <Stack gap={5}>
      <Flex align="center" gap={3} wrap="wrap">
        <StateBadge state={message.state} />
        <Heading as="h2" fontFamily="mono" overflowWrap="anywhere" size="md">
          {message.id}
        </Heading>
        <Clipboard.Root value={message.id}>
          <Clipboard.Trigger asChild>
            <IconButton aria-label="Copy the id" size="xs" variant="ghost">
              <Clipboard.Indicator />
            </IconButton>
          </Clipboard.Trigger>
        </Clipboard.Root>
        <Actions message={message} />
      </Flex>
      {message.warning !== null && (
        <Alert.Root status="warning">
          <Alert.Indicator />
          <Alert.Title>{message.warning}</Alert.Title>
        </Alert.Root>
      )}
      <Grid gap={6} templateColumns={{ base: "minmax(0, 1fr)", lg: "minmax(0, 1fr) minmax(0, 1fr)" }}>
        <Section title="Details">
          <Details message={message} />
        </Section>
        <Section title="History">
          <HistoryTimeline messageId={message.id} />
        </Section>
        <Section title="Payload">
          <PayloadViewer message={message} />
        </Section>
        <Section title="Headers">
          <Headers headers={message.headers} />
        </Section>
      </Grid>
    </Stack>
  );
}

function Actions({ message }: { message: MessageDetail }) {
  const connId = useConnId();
  const [name, setName] = useState<ActionName | null>(null);
  return (
    <Flex gap={2} ms="auto" wrap="wrap">
      {message.actions.map((each) => (
        <Button key={each} onClick={() => setName(each)} size="sm" variant="outline">
          {WORDINGS[each].name}
        </Button>
      ))}
      {name !== null && (
        <ActionDialog
          action={{ name, target: { ids: [message.id] }, connId, generation: message.generation }}
          onClose={() => setName(null)}
        />
      )}
    </Flex>
  );
}

function Details({ message }: { message: MessageDetail }) {
  return (
    <DataList.Root orientation="horizontal" size="sm">
      <Fact name="Due">
        <Stack gap={0}>
          <Moment at={message.deliver_at} />
          {message.state === "SCHEDULED" && <Countdown at={message.deliver_at} />}
        </Stack>
      </Fact>
      {message.dispatched_at !== null && (
        <Fact name="Dispatched">
          <Moment at={message.dispatched_at} />
        </Fact>
      )}
      {message.lateness_ms !== null && (
        <Fact name="Lateness">
          {message.lateness_ms < 0 ? `${describeSpan(message.lateness_ms)} early` : describeSpan(message.lateness_ms)}
        </Fact>
      )}
      <Fact name="Scheduled">
        <Text>
          <Moment at={message.scheduled_at} /> (<Distance at={message.scheduled_at} />)
        </Text>
      </Fact>
      <Fact name="Channel">{message.channel}</Fact>
      <Fact name="Connection">
        {message.connection}, held by the {message.held_by}
      </Fact>
      <Fact name="Scheduled by">
        <Stack gap={0}>
          <TaskLink origin={message.origin} />
          {message.is_awaited && <Text color="fg.muted">This task is deferred now and waits for a message.</Text>}
        </Stack>
      </Fact>
      {message.key !== null && <Fact name="Key">{message.key}</Fact>}
      <Fact name="Priority">{message.priority}</Fact>
      <Fact name="Handled count">{message.handled_count}</Fact>
      <Fact name="Generation">{message.generation}</Fact>
    </DataList.Root>
  );
}

function Fact({ name, children }: { name: string; children: ReactNode }) {
  return (
    <DataList.Item>
      <DataList.ItemLabel>{name}</DataList.ItemLabel>
      <DataList.ItemValue overflowWrap="anywhere">{children}</DataList.ItemValue>
    </DataList.Item>
  );
}

function Headers({ headers }: { headers: Record<string, string> }) {
  const entries = Object.entries(headers);
  if (entries.length === 0) {
    return <Text color="fg.muted">This message has no headers.</Text>;
  }
  return (
    <Table.Root size="sm">
      <Table.Header>
        <Table.Row>
          <Table.ColumnHeader>Name</Table.ColumnHeader>
          <Table.ColumnHeader>Value</Table.ColumnHeader>
        </Table.Row>
      </Table.Header>
      <Table.Body>
        {entries.map(([name, value]) => (
          <Table.Row key={name}>
            <Table.Cell overflowWrap="anywhere">{name}</Table.Cell>
            <Table.Cell fontFamily="mono" fontSize="xs" overflowWrap="anywhere">
              {value}
            </Table.Cell>
          </Table.Row>
        ))}
      </Table.Body>
    </Table.Root>
  );
}
