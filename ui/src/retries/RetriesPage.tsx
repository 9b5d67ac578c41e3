import { Stack } from "@chakra-ui/react";
import { useSearchParams } from "react-router-dom";

import { useHealth, useRetries } from "../api/queries";
import { EmptyState } from "../layout/EmptyState";
import { Loaded } from "../layout/Loaded";
import { Pager } from "../layout/Pager";
import { Section } from "../layout/Section";
import { Unfinished } from "../layout/Unfinished";
import { usePage } from "../layout/usePage";
import { readFilters } from "../messages/filters";
import { CircuitText } from "./CircuitText";
import { RetryCard } from "./RetryCard";

export function RetriesPage() {
  const [params] = useSearchParams();
  const [page, turn] = usePage();
  const { dag_id, run_id, task_id } = readFilters(params);
  const query = useRetries({ dag_id, run_id, task_id, page });

  return (
    <Stack gap={5}>
      <Clusters />
      <Section title="Waiting Spark jobs">
        <Loaded query={query}>
          {({ retries, next, prev, continuation }) => (
            <Stack gap={3}>
              {retries.length === 0 && continuation === null && (
                <EmptyState title="No Spark job waits for a retry">
                  A job that fails for a passing reason waits here until it is submitted again.
                </EmptyState>
              )}
              {retries.map((retry) => (
                <RetryCard key={retry.message.id} retry={retry} />
              ))}
              <Unfinished continuation={continuation} onTurn={turn} />
              <Pager next={next} onTurn={turn} prev={prev} />
            </Stack>
          )}
        </Loaded>
      </Section>
    </Stack>
  );
}

function Clusters() {
  const { data } = useHealth();
  if (data === undefined || data.circuits.length === 0) {
    return null;
  }
  return (
    <Section title="Clusters">
      {data.circuits.map((circuit) => (
        <CircuitText circuit={circuit} key={circuit.cluster} />
      ))}
    </Section>
  );
}
