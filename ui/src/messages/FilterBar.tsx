import { Box, Button, Collapsible, Field, Flex, Input, SimpleGrid } from "@chakra-ui/react";
import { useEffect, useId, useRef, useState } from "react";
import { useSearchParams } from "react-router-dom";

import type { StateName } from "../api/client";
import { useChannels } from "../api/queries";
import { fromInput, toInput, viewerZone } from "../time/zone";
import { changeFilters, type Filters, hasFilters, NO_FILTERS, readFilters, STATES, type TextFilter } from "./filters";

const TYPING_MS = 400;
const LABELS: Record<TextFilter, string> = {
  search: "Text in the id",
  channel: "Channel",
  connection: "Connection",
  dag_id: "DAG",
  run_id: "Run",
  task_id: "Task",
  due_from: "Due from",
  due_to: "Due until",
};
const MORE: TextFilter[] = ["connection", "dag_id", "run_id", "task_id", "due_from", "due_to"];

/** Filters of a list. They are in the address bar, so that it can be shared. */
export function FilterBar({ withState = false }: { withState?: boolean }) {
  const [params, setParams] = useSearchParams();
  const filters = readFilters(params);
  const [isOpen, setIsOpen] = useState(MORE.some((name) => filters[name] !== undefined));
  // Two changes may come before the next render, which brings the parameters of the first one.
  const latest = useRef(params);
  useEffect(() => {
    latest.current = params;
  }, [params]);
  const change = (changes: Partial<Filters>) => {
    latest.current = changeFilters(latest.current, changes);
    setParams(latest.current, { replace: true });
  };
  const toggle = (state: StateName) =>
    change({
      state: filters.state.includes(state) ? filters.state.filter((each) => each !== state) : [...filters.state, state],
    });
  const text = (name: TextFilter) => (
    <TextField key={name} name={name} onChange={(value) => change({ [name]: value })} value={filters[name] ?? ""} />
  );

  return (
    <Collapsible.Root onOpenChange={({ open }) => setIsOpen(open)} open={isOpen}>
      <Flex align="end" gap={3} mb={3} role="search" wrap="wrap">
        <Box flex="1 1 14rem">{text("search")}</Box>
        <Box flex="1 1 10rem">{text("channel")}</Box>
        {withState && (
          <Flex aria-label="State" gap={1} role="group" wrap="wrap">
            {STATES.map((state) => (
              <Button
                aria-pressed={filters.state.includes(state)}
                key={state}
                onClick={() => toggle(state)}
                size="sm"
                variant={filters.state.includes(state) ? "solid" : "outline"}
              >
                {state.toLowerCase()}
              </Button>
            ))}
          </Flex>
        )}
        <Flex gap={1}>
          <Collapsible.Trigger asChild>
            <Button size="sm" variant="ghost">
              {isOpen ? "Fewer filters" : "More filters"}
            </Button>
          </Collapsible.Trigger>
          {hasFilters(filters) && (
            <Button onClick={() => change(NO_FILTERS)} size="sm" variant="ghost">
              Clear filters
            </Button>
          )}
        </Flex>
      </Flex>
      <Collapsible.Content>
        <SimpleGrid gap={3} mb={3} minChildWidth="12rem">
          {MORE.map((name) =>
            name === "due_from" || name === "due_to" ? (
              <TimeField key={name} name={name} onChange={(value) => change({ [name]: value })} value={filters[name]} />
            ) : (
              text(name)
            ),
          )}
        </SimpleGrid>
      </Collapsible.Content>
    </Collapsible.Root>
  );
}

interface TextFieldProps {
  name: TextFilter;
  value: string;
  onChange: (value: string) => void;
}

function TextField({ name, value, onChange }: TextFieldProps) {
  const [typed, setTyped] = useState({ text: value, known: value, sent: value });
  const timer = useRef<number>(undefined);
  const pending = useRef<() => void>(undefined);
  const suggestions = useId();
  // Airflow may mount the page again when another filter changes: what was typed must not be lost.
  useEffect(() => () => pending.current?.(), []);
  if (value !== typed.known) {
    // What was typed since it was sent stays. Other changes of the address bar, such as "Clear filters", replace it.
    setTyped({ ...typed, text: value === typed.sent ? typed.text : value, known: value });
  }

  return (
    <Field.Root>
      <Field.Label>{LABELS[name]}</Field.Label>
      <Input
        list={name === "channel" ? suggestions : undefined}
        maxLength={255}
        onChange={(event) => {
          const text = event.target.value;
          setTyped({ ...typed, text });
          window.clearTimeout(timer.current);
          pending.current = () => {
            window.clearTimeout(timer.current);
            pending.current = undefined;
            setTyped((current) => ({ ...current, sent: text.trim() }));
            onChange(text.trim());
          };
          timer.current = window.setTimeout(() => pending.current?.(), TYPING_MS);
        }}
        size="sm"
        type="search"
        value={typed.text}
      />
      {name === "channel" && <ChannelSuggestions id={suggestions} />}
    </Field.Root>
  );
}

function ChannelSuggestions({ id }: { id: string }) {
  const { data } = useChannels();
  return (
    <datalist id={id}>
      {data?.channels.map(({ channel }) => <option key={channel} value={channel} />)}
    </datalist>
  );
}

interface TimeFieldProps {
  name: "due_from" | "due_to";
  value: string | undefined;
  onChange: (value: string) => void;
}

function TimeField({ name, value, onChange }: TimeFieldProps) {
  const zone = viewerZone();
  return (
    <Field.Root>
      <Field.Label>
        {LABELS[name]} ({zone})
      </Field.Label>
      <Input
        onChange={(event) => onChange(event.target.value === "" ? "" : fromInput(event.target.value, zone))}
        size="sm"
        type="datetime-local"
        value={value === undefined ? "" : toInput(value, zone)}
      />
    </Field.Root>
  );
}
