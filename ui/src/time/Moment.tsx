import { chakra } from "@chakra-ui/react";

import { formatInZone, formatUtc, viewerZone } from "./zone";

/** A time in the viewer's zone, with UTC on hover. */
export function Moment({ at }: { at: string }) {
  const date = new Date(at);
  return (
    <chakra.time dateTime={at} title={formatUtc(date)} whiteSpace={{ md: "nowrap" }}>
      {formatInZone(date, viewerZone())}
    </chakra.time>
  );
}
