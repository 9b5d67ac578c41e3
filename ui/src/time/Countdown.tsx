import { chakra } from "@chakra-ui/react";

import { useNow } from "./clock";
import { describeDistance, describeSpan } from "./span";
import { formatUtc } from "./zone";

/** The time until a delivery time, or since when it is overdue. */
export function Countdown({ at }: { at: string }) {
  const left = Date.parse(at) - useNow();
  return (
    <chakra.time
      color={left < -1000 ? "fg.error" : "fg.muted"}
      dateTime={at}
      fontVariantNumeric="tabular-nums"
      title={formatUtc(new Date(at))}
      whiteSpace="nowrap"
    >
      {left < -1000 ? `${describeSpan(left)} overdue` : left < 1000 ? "due now" : `in ${describeSpan(left)}`}
    </chakra.time>
  );
}

/** A time relative to now, such as "5 s ago". */
export function Distance({ at }: { at: string }) {
  return (
    <chakra.time dateTime={at} fontVariantNumeric="tabular-nums" title={formatUtc(new Date(at))} whiteSpace="nowrap">
      {describeDistance(Date.parse(at), useNow())}
    </chakra.time>
  );
}
