import { Text, Timeline } from "@chakra-ui/react";

import type { HistoryEntry, StateName } from "../api/client";
import { useHistory } from "../api/queries";
import { Loaded } from "../layout/Loaded";
import { Distance } from "../time/Countdown";
import { Moment } from "../time/Moment";

const COLOURS: Record<StateName, string> = {
  SCHEDULED: "blue.solid",
  DISPATCHED: "green.solid",
  CANCELLED: "gray.solid",
  DEAD: "red.solid",
};

/** What happened to a message, newest last. */
export function HistoryTimeline({ messageId }: { messageId: string }) {
  return (
    <Loaded query={useHistory(messageId)}>
      {({ entries, omitted }) => (
        <>
          {omitted > 0 && <Text color="fg.muted">{omitted.toLocaleString("en")} earlier entries are left out.</Text>}
          <Timeline.Root as="ol" listStyleType="none" size="sm">
            {entries.map((entry, index) => (
              <Entry entry={entry} isFirst={index === 0} key={`${entry.at} ${entry.change} ${index}`} />
            ))}
          </Timeline.Root>
        </>
      )}
    </Loaded>
  );
}

function Entry({ entry, isFirst }: { entry: HistoryEntry; isFirst: boolean }) {
  return (
    <Timeline.Item as="li">
      <Timeline.Connector>
        <Timeline.Separator />
        <Timeline.Indicator bg={COLOURS[entry.state]} />
      </Timeline.Connector>
      <Timeline.Content>
        <Timeline.Title>{entry.change.replaceAll("_", "-")}</Timeline.Title>
        <Timeline.Description>
          <Moment at={entry.at} /> (<Distance at={entry.at} />)
        </Timeline.Description>
        {(isFirst || entry.change === "rescheduled") && (
          <Text fontSize="sm">
            due <Moment at={entry.deliver_at} />
          </Text>
        )}
        {entry.reason !== null && (
          <Text fontSize="sm" overflowWrap="anywhere">
            {entry.reason}
          </Text>
        )}
      </Timeline.Content>
    </Timeline.Item>
  );
}
