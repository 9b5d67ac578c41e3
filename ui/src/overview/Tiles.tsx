import { Link, SimpleGrid, Stat } from "@chakra-ui/react";
import type { ReactNode } from "react";
import { Link as RouterLink } from "react-router-dom";

import type { Counts } from "../api/client";
import { useConnId, useCounts } from "../api/queries";
import { HOME, withConnId } from "../layout/links";
import { Loaded } from "../layout/Loaded";
import { Countdown } from "../time/Countdown";
import { Moment } from "../time/Moment";

/** Counts by state, each of which leads to the messages. */
export function Tiles() {
  return (
    <Loaded isErrorShownElsewhere query={useCounts()}>
      {(counts) => <TileGrid counts={counts} />}
    </Loaded>
  );
}

function TileGrid({ counts: { counts, overdue, next_scheduled_message_at: next, now } }: { counts: Counts }) {
  const overdueCount = `${overdue.count.toLocaleString("en")}${overdue.is_exact ? "" : "+"}`;
  return (
    <SimpleGrid columns={{ base: 2, md: 3, xl: 6 }} gap={3}>
      <Tile label="Scheduled" to={`${HOME}/messages?state=SCHEDULED`} value={counts.SCHEDULED?.count ?? 0} />
      <Tile
        isBad={overdue.count > 0}
        label="Overdue"
        to={`${HOME}/messages?state=SCHEDULED&due_to=${encodeURIComponent(now)}`}
        value={overdueCount}
      >
        {overdue.oldest_deliver_at !== null && <Countdown at={overdue.oldest_deliver_at} />}
      </Tile>
      <Tile label="Next due" value={next === null ? "none" : <Countdown at={next} />}>
        {next !== null && <Moment at={next} />}
      </Tile>
      <Tile label="Dispatched" to={`${HOME}/messages?state=DISPATCHED`} value={counts.DISPATCHED?.count ?? 0} />
      <Tile label="Cancelled" to={`${HOME}/messages?state=CANCELLED`} value={counts.CANCELLED?.count ?? 0} />
      <Tile
        isBad={(counts.DEAD?.count ?? 0) > 0}
        label="Dead letters"
        to={`${HOME}/dead-letters`}
        value={counts.DEAD?.count ?? 0}
      />
    </SimpleGrid>
  );
}

interface TileProps {
  label: string;
  value: number | ReactNode;
  to?: string;
  isBad?: boolean;
  children?: ReactNode;
}

function Tile({ label, value, to, isBad = false, children }: TileProps) {
  const connId = useConnId();
  return (
    <Stat.Root borderRadius="md" borderWidth={1} p={3} size={{ base: "sm", md: "md" }}>
      <Stat.Label>
        {to === undefined ? (
          label
        ) : (
          <Link asChild color="fg.info">
            <RouterLink to={withConnId(to, connId)}>{label}</RouterLink>
          </Link>
        )}
      </Stat.Label>
      <Stat.ValueText color={isBad ? "fg.error" : undefined}>
        {typeof value === "number" ? value.toLocaleString("en") : value}
      </Stat.ValueText>
      <Stat.HelpText as="dd">{children}</Stat.HelpText>
    </Stat.Root>
  );
}
