import { Badge, Button, Card, Flex, Stack, Text } from "@chakra-ui/react";
import { useState } from "react";

import { ActionDialog } from "../actions/ActionDialog";
import type { ActionName, Wording } from "../actions/wording";
import { GIVE_UP, RETRY_NOW } from "../actions/wording";
import type { Retry } from "../api/client";
import { useConnId } from "../api/queries";
import { TaskLink } from "../layout/TaskLink";
import { Countdown, Distance } from "../time/Countdown";
import { Moment } from "../time/Moment";
import { AttemptList } from "./AttemptList";
import { CircuitText } from "./CircuitText";

const WAITS_FOR: Record<string, string> = {
  backoff: "until its backoff ends",
  cluster: "for its cluster to come back",
  rate_limit: "for the rate limit of its cluster",
};

/** A Spark job that waits for its next submission. */
export function RetryCard({ retry }: { retry: Retry }) {
  const connId = useConnId();
  const [asked, setAsked] = useState<{ name: ActionName; wording: Wording } | null>(null);
  return (
    <Card.Root size="sm">
      <Card.Body gap={3}>
        <Flex align="start" gap={3} justify="space-between" wrap="wrap">
          <TaskLink origin={retry.message.origin} />
          {retry.message.can_edit && (
            <Flex gap={2}>
              <Button onClick={() => setAsked({ name: "expedite", wording: RETRY_NOW })} size="sm" variant="outline">
                Retry now
              </Button>
              <Button onClick={() => setAsked({ name: "cancel", wording: GIVE_UP })} size="sm" variant="outline">
                Give up
              </Button>
            </Flex>
          )}
        </Flex>
        <Stack gap={1}>
          <Text>
            Last failure: <Badge variant="surface">{retry.verdict}</Badge>
          </Text>
          <Text fontFamily="mono" fontSize="xs" overflowWrap="anywhere">
            {retry.reason}
          </Text>
          <Text>
            Attempt {retry.attempt} waits {WAITS_FOR[retry.waits_for] ?? `for ${retry.waits_for}`}:{" "}
            <Moment at={retry.next_try_at} /> (<Countdown at={retry.next_try_at} />
            ). The first attempt was <Distance at={retry.began_at} />.
          </Text>
          <CircuitText circuit={retry.circuit} />
        </Stack>
        <AttemptList history={retry.history} />
      </Card.Body>
      {asked !== null && (
        <ActionDialog
          action={{ name: asked.name, target: { ids: [retry.message.id] }, connId }}
          onClose={() => setAsked(null)}
          wording={asked.wording}
        />
      )}
    </Card.Root>
  );
}
