import { Status, Text } from "@chakra-ui/react";

import type { Circuit } from "../api/client";
import { Countdown, Distance } from "../time/Countdown";

/** Whether a Spark cluster is known to be down, since when, and when it is checked again. */
export function CircuitText({ circuit }: { circuit: Circuit }) {
  return (
    <Text fontSize="sm" overflowWrap="anywhere">
      <Status.Root colorPalette={circuit.is_open ? "red" : "green"} me={1} size="sm">
        <Status.Indicator />
      </Status.Root>
      Cluster {circuit.cluster}: {circuit.is_open ? "circuit open" : "circuit closed"}
      {circuit.is_open && circuit.down_since !== null && (
        <>
          , down since <Distance at={circuit.down_since} />
        </>
      )}
      {circuit.is_open && `, ${circuit.failed_checks} failed ${circuit.failed_checks === 1 ? "check" : "checks"}`}
      {circuit.next_check_at !== null && (
        <>
          , next check <Countdown at={circuit.next_check_at} />
        </>
      )}
    </Text>
  );
}
