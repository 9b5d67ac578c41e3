import { SegmentGroup } from "@chakra-ui/react";
import { useSearchParams } from "react-router-dom";

import type { Range } from "../api/queries";

const LABELS: Record<Range, string> = { hour: "Hour", day: "Day", month: "30 days" };

/** Returns the range in the address bar, under a name of its own for each chart. */
export function useRange(name: string): Range {
  const [params] = useSearchParams();
  const value = params.get(name);
  return value === "day" || value === "month" ? value : "hour";
}

export function RangeSwitch({ name, label }: { name: string; label: string }) {
  const [, setParams] = useSearchParams();
  const range = useRange(name);
  return (
    <SegmentGroup.Root
      aria-label={label}
      onValueChange={({ value }) =>
        setParams(
          (params) => {
            params.set(name, value ?? "hour");
            return params;
          },
          { replace: true },
        )
      }
      size="sm"
      value={range}
    >
      <SegmentGroup.Indicator />
      <SegmentGroup.Items items={Object.entries(LABELS).map(([value, text]) => ({ value, label: text }))} />
    </SegmentGroup.Root>
  );
}
