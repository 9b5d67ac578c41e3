import { useState } from "react";
import { useSearchParams } from "react-router-dom";

import { useMessages } from "../api/queries";
import { EmptyState } from "../layout/EmptyState";
import { Loaded } from "../layout/Loaded";
import { Pager } from "../layout/Pager";
import { Unfinished } from "../layout/Unfinished";
import { usePage } from "../layout/usePage";
import { FilterBar } from "./FilterBar";
import { type Filters, hasFilters, readFilters, toActionFilter } from "./filters";
import { connectionColumn, dueColumn, idColumn, MessageTable, originColumn, stateColumn } from "./MessageTable";
import { SelectionBar } from "./SelectionBar";

const COLUMNS = [stateColumn(), idColumn(), dueColumn(), connectionColumn(), originColumn()];

export function MessagesPage() {
  const [params] = useSearchParams();
  const [page, turn] = usePage();
  const [ids, setIds] = useState<string[]>([]);
  const filters = readFilters(params);
  const query = useMessages({ ...filters, page });
  const selection = { ids, onChange: setIds };

  return (
    <>
      <FilterBar withState />
      <Loaded query={query}>
        {({ messages, next, prev, continuation, notice }) => (
          <>
            {messages.some(({ can_edit }) => can_edit) && (
              <SelectionBar
                actions={["cancel", "reschedule", "expedite"]}
                filter={canChangeAll(filters) ? toActionFilter(filters) : undefined}
                selection={selection}
              />
            )}
            {messages.length > 0 ? (
              <MessageTable
                caption="Messages, ordered by delivery time"
                columns={COLUMNS}
                list={params.toString()}
                messages={messages}
                selection={messages.some(({ can_edit }) => can_edit) ? selection : undefined}
              />
            ) : (
              continuation === null && <NoMessages isFiltered={hasFilters(filters)} notice={notice} />
            )}
            <Unfinished continuation={continuation} onTurn={turn} />
            <Pager next={next} onTurn={turn} prev={prev} />
          </>
        )}
      </Loaded>
    </>
  );
}

/** Only scheduled messages can be changed, so a list of others has none to take. */
function canChangeAll({ state }: Filters): boolean {
  return state.length === 0 || state.includes("SCHEDULED");
}

function NoMessages({ isFiltered, notice }: { isFiltered: boolean; notice: string | null }) {
  if (notice !== null) {
    return <EmptyState title="Messages of this connection are not listed">{notice}</EmptyState>;
  }
  return isFiltered ? (
    <EmptyState title="No message matches these filters">Messages appear here as soon as one does.</EmptyState>
  ) : (
    <EmptyState title="No messages yet">
      Schedule one with ScheduleMessageOperator or “airflow delay schedule”. It appears here by itself.
    </EmptyState>
  );
}
