import { Box, Stack } from "@chakra-ui/react";
import { useState } from "react";

import { useAttempts, useMessages, useRetries } from "../api/queries";
import { EmptyState } from "../layout/EmptyState";
import { Loaded } from "../layout/Loaded";
import { Pager } from "../layout/Pager";
import { Section } from "../layout/Section";
import { Unfinished } from "../layout/Unfinished";
import { dueColumn, idColumn, MessageTable, stateColumn } from "../messages/MessageTable";
import { SelectionBar } from "../messages/SelectionBar";
import { AttemptList } from "../retries/AttemptList";
import { RetryCard } from "../retries/RetryCard";

const COLUMNS = [stateColumn(), idColumn(), dueColumn()];

interface Props {
  dagId: string;
  runId: string;
  taskId: string;
  mapIndex: number;
}

/** Messages and Spark retries of one task instance. */
export function TaskTab({ dagId, runId, taskId, mapIndex }: Props) {
  const task = { dag_id: dagId, run_id: runId, task_id: taskId, map_index: mapIndex };
  const [page, setPage] = useState<string>();
  const [ids, setIds] = useState<string[]>([]);
  const selection = { ids, onChange: setIds };
  return (
    <Stack gap={5} p={{ base: 2, md: 4 }}>
      <Retries task={task} />
      <Section title="Messages of this task">
        <Loaded query={useMessages({ ...task, page })}>
          {({ messages, next, prev, continuation }) => {
            const canEdit = messages.some(({ can_edit }) => can_edit);
            return (
              <>
                {messages.length === 0 && continuation === null && (
                  <EmptyState title="This task has scheduled no messages" />
                )}
                {canEdit && (
                  <SelectionBar actions={["cancel", "reschedule", "expedite"]} filter={task} selection={selection} />
                )}
                {messages.length > 0 && (
                  <MessageTable
                    caption="Messages of this task"
                    columns={COLUMNS}
                    list={page ?? ""}
                    messages={messages}
                    selection={canEdit ? selection : undefined}
                  />
                )}
                <Unfinished continuation={continuation} onTurn={setPage} />
                <Pager next={next} onTurn={setPage} prev={prev} />
              </>
            );
          }}
        </Loaded>
      </Section>
    </Stack>
  );
}

/** The waiting retry, or else the attempts of a Spark task. Other tasks have neither. */
function Retries({ task }: { task: { dag_id: string; run_id: string; task_id: string; map_index: number } }) {
  const retries = useRetries(task).data?.retries ?? [];
  const attempts = useAttempts(task).data;
  if (retries.length === 0 && (attempts?.attempts.length ?? 0) === 0) {
    return null;
  }
  return (
    <Section title="Spark retries">
      {retries.map((retry) => (
        <RetryCard key={retry.message.id} retry={retry} />
      ))}
      {retries.length === 0 && attempts !== undefined && (
        <Box>
          <AttemptList history={attempts} />
        </Box>
      )}
    </Section>
  );
}
