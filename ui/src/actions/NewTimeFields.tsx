import { Field, Flex, Input, NativeSelect } from "@chakra-ui/react";
import { useState } from "react";

import { serverNow } from "../time/clock";
import { fromInput, toInput, viewerZone } from "../time/zone";
import type { NewTime } from "./perform";

const UNITS = { seconds: 1, minutes: 60, hours: 3600, days: 86_400 };
type Unit = keyof typeof UNITS;

/** Asks for a delivery time: after a delay, or at a time. */
export function NewTimeFields({ onChange }: { onChange: (newTime: NewTime | null) => void }) {
  const zone = viewerZone();
  const [kind, setKind] = useState<"after" | "at">("after");
  const [amount, setAmount] = useState("10");
  const [unit, setUnit] = useState<Unit>("minutes");
  const [time, setTime] = useState(() => toInput(new Date(serverNow() + 600_000).toISOString(), zone));

  const change = (next: { kind?: "after" | "at"; amount?: string; unit?: Unit; time?: string }) => {
    const all = { kind, amount, unit, time, ...next };
    setKind(all.kind);
    setAmount(all.amount);
    setUnit(all.unit);
    setTime(all.time);
    onChange(readTime(all, zone));
  };

  return (
    <Flex gap={3} wrap="wrap">
      <Field.Root width="auto">
        <Field.Label>New delivery time</Field.Label>
        <NativeSelect.Root>
          <NativeSelect.Field onChange={(event) => change({ kind: event.target.value as "after" | "at" })} value={kind}>
            <option value="after">after a delay</option>
            <option value="at">at a time</option>
          </NativeSelect.Field>
          <NativeSelect.Indicator />
        </NativeSelect.Root>
      </Field.Root>
      {kind === "after" ? (
        <>
          <Field.Root width={24}>
            <Field.Label>Delay</Field.Label>
            <Input min={0} onChange={(event) => change({ amount: event.target.value })} type="number" value={amount} />
          </Field.Root>
          <Field.Root width="auto">
            <Field.Label>Unit</Field.Label>
            <NativeSelect.Root>
              <NativeSelect.Field onChange={(event) => change({ unit: event.target.value as Unit })} value={unit}>
                {Object.keys(UNITS).map((name) => (
                  <option key={name}>{name}</option>
                ))}
              </NativeSelect.Field>
              <NativeSelect.Indicator />
            </NativeSelect.Root>
          </Field.Root>
        </>
      ) : (
        <Field.Root width="auto">
          <Field.Label>Time ({zone})</Field.Label>
          <Input onChange={(event) => change({ time: event.target.value })} type="datetime-local" value={time} />
        </Field.Root>
      )}
    </Flex>
  );
}

interface Fields {
  kind: "after" | "at";
  amount: string;
  unit: Unit;
  time: string;
}

function readTime({ kind, amount, unit, time }: Fields, zone: string): NewTime | null {
  if (kind === "at") {
    return time === "" ? null : { deliver_at: fromInput(time, zone) };
  }
  const seconds = Number(amount) * UNITS[unit];
  return amount === "" || !(seconds >= 0) ? null : { deliver_after: seconds };
}
