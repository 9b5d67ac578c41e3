import { useState } from "react";
import { useSearchParams } from "react-router-dom";

import type { DeadLetter } from "../api/client";
import { useDeadLetters } from "../api/queries";
import { EmptyState } from "../layout/EmptyState";
import { Loaded } from "../layout/Loaded";
import { Pager } from "../layout/Pager";
import { Unfinished } from "../layout/Unfinished";
import { usePage } from "../layout/usePage";
import { FilterBar } from "../messages/FilterBar";
import { readFilters } from "../messages/filters";
import { connectionColumn, idColumn, MessageTable, originColumn, reasonColumn } from "../messages/MessageTable";
import { SelectionBar } from "../messages/SelectionBar";

const COLUMNS = [idColumn<DeadLetter>(), reasonColumn, connectionColumn<DeadLetter>(), originColumn<DeadLetter>()];

export function DeadLettersPage() {
  const [params] = useSearchParams();
  const [page, turn] = usePage();
  const [ids, setIds] = useState<string[]>([]);
  const { state, ...filters } = readFilters(params);
  const query = useDeadLetters({ ...filters, page });
  const selection = { ids, onChange: setIds };

  return (
    <>
      <FilterBar />
      <Loaded query={query}>
        {({ messages, next, prev, continuation }) => {
          const canReplay = messages.some(({ can_edit }) => can_edit);
          return (
            <>
              {messages.length === 0 && continuation === null && (
                <EmptyState title={Object.keys(filters).length > 0 ? "No dead letter matches" : "No dead letters"}>
                  A message that cannot be delivered appears here with the reason.
                </EmptyState>
              )}
              {canReplay && <SelectionBar actions={["replay"]} filter={filters} selection={selection} />}
              {messages.length > 0 && (
                <MessageTable
                  caption="Dead letters"
                  columns={COLUMNS}
                  list={params.toString()}
                  messages={messages}
                  selection={canReplay ? selection : undefined}
                />
              )}
              <Unfinished continuation={continuation} onTurn={turn} />
              <Pager next={next} onTurn={turn} prev={prev} />
            </>
          );
        }}
      </Loaded>
    </>
  );
}
