import { Box, Button, Checkbox, Link, Table, Text } from "@chakra-ui/react";
import {
  type ColumnDef,
  flexRender,
  getCoreRowModel,
  type RowSelectionState,
  useReactTable,
} from "@tanstack/react-table";
import { type ReactNode, useMemo } from "react";
import { Link as RouterLink } from "react-router-dom";

import type { DeadLetter, MessageSummary } from "../api/client";
import { useConnId } from "../api/queries";
import { messagePath } from "../layout/links";
import { StateBadge } from "../layout/StateBadge";
import { TaskLink } from "../layout/TaskLink";
import { Countdown } from "../time/Countdown";
import { Moment } from "../time/Moment";
import { describeSpan } from "../time/span";
import { useSteadyRows } from "./useSteadyRows";

declare module "@tanstack/react-table" {
  // eslint-disable-next-line @typescript-eslint/no-unused-vars -- the names are those of the extended interface
  interface ColumnMeta<TData, TValue> {
    /** The screen from which on the column is shown. */
    from?: "md" | "lg";
    width?: string;
  }
}

export interface Selection {
  ids: string[];
  onChange: (ids: string[]) => void;
}

interface Props<T extends MessageSummary> {
  messages: T[];
  columns: ColumnDef<T>[];
  caption: string;
  /** Names the list: its filters and page. */
  list: string;
  /** Adds a checkbox to each row. */
  selection?: Selection;
}

/** Messages with live refresh. Rows stay in place while they are used. */
export function MessageTable<T extends MessageSummary>({ messages, columns, caption, list, selection }: Props<T>) {
  const ids = selection?.ids ?? [];
  const { rows, changes, touch, showChanges } = useSteadyRows(messages, list, ids.length > 0);
  const hasCheckboxes = selection !== undefined;
  const allColumns = useMemo(() => (hasCheckboxes ? [selectColumn<T>(), ...columns] : columns), [hasCheckboxes, columns]);
  const table = useReactTable({
    data: rows,
    columns: allColumns,
    autoResetAll: false,
    getCoreRowModel: getCoreRowModel(),
    getRowId: ({ id }) => id,
    enableRowSelection: ({ original }) => original.can_edit,
    state: { rowSelection: Object.fromEntries(ids.map((id) => [id, true])) },
    onRowSelectionChange: (update) => {
      const before: RowSelectionState = Object.fromEntries(ids.map((id) => [id, true]));
      selection?.onChange(Object.keys(typeof update === "function" ? update(before) : update));
    },
  });

  return (
    <Box position="relative">
      <Box aria-live="polite" insetEnd={0} position="absolute" top={1} zIndex={1}>
        {changes > 0 && (
          <Button onClick={showChanges} size="xs" variant="subtle">
            Show {changes === 1 ? "1 change" : `${changes} changes`}
          </Button>
        )}
      </Box>
      <Table.ScrollArea
        onBlur={(event) => !event.currentTarget.contains(event.relatedTarget) && touch(false)}
        onFocus={() => touch(true)}
        onPointerEnter={() => touch(true)}
        onPointerLeave={() => touch(false)}
        whiteSpace="normal"
      >
        <Table.Root size="sm" tableLayout={{ base: "auto", md: "fixed" }}>
          <Table.Caption srOnly>{caption}</Table.Caption>
          <Table.Header>
            {table.getHeaderGroups().map((group) => (
              <Table.Row key={group.id}>
                {group.headers.map(({ id, column, getContext }) => (
                  <Table.ColumnHeader
                    display={displayFrom(column.columnDef.meta?.from)}
                    key={id}
                    width={column.columnDef.meta?.width}
                  >
                    {flexRender(column.columnDef.header, getContext())}
                  </Table.ColumnHeader>
                ))}
              </Table.Row>
            ))}
          </Table.Header>
          <Table.Body>
            {table.getRowModel().rows.map((row) => (
              <Table.Row data-selected={row.getIsSelected() ? "" : undefined} key={row.id}>
                {row.getVisibleCells().map(({ id, column, getContext }) => (
                  <Table.Cell display={displayFrom(column.columnDef.meta?.from)} key={id} verticalAlign="top">
                    {flexRender(column.columnDef.cell, getContext())}
                  </Table.Cell>
                ))}
              </Table.Row>
            ))}
          </Table.Body>
        </Table.Root>
      </Table.ScrollArea>
    </Box>
  );
}

function displayFrom(screen: "md" | "lg" | undefined) {
  return screen === undefined ? undefined : { base: "none", [screen]: "table-cell" };
}

function selectColumn<T extends MessageSummary>(): ColumnDef<T> {
  return {
    id: "select",
    meta: { width: "2.5rem" },
    header: ({ table }) => (
      <RowCheckbox
        checked={table.getIsAllRowsSelected() || (table.getIsSomeRowsSelected() && "indeterminate")}
        label="Select all on this page"
        onChange={(checked) => table.toggleAllRowsSelected(checked)}
      />
    ),
    cell: ({ row }) => (
      <RowCheckbox
        checked={row.getIsSelected()}
        disabled={!row.getCanSelect()}
        label={`Select ${row.id}`}
        onChange={(checked) => row.toggleSelected(checked)}
      />
    ),
  };
}

interface RowCheckboxProps {
  checked: boolean | "indeterminate";
  disabled?: boolean;
  label: string;
  onChange: (checked: boolean) => void;
}

function RowCheckbox({ checked, disabled, label, onChange }: RowCheckboxProps) {
  return (
    <Checkbox.Root
      checked={checked}
      disabled={disabled}
      onCheckedChange={(change) => onChange(change.checked === true)}
      size="sm"
      title={disabled ? "You may not change this message" : undefined}
    >
      <Checkbox.HiddenInput aria-label={label} />
      <Checkbox.Control />
    </Checkbox.Root>
  );
}

export function stateColumn<T extends MessageSummary>(): ColumnDef<T> {
  return {
    header: "State",
    meta: { width: "7.5rem" },
    cell: ({ row }) => <StateBadge state={row.original.state} />,
  };
}

export function idColumn<T extends MessageSummary>(): ColumnDef<T> {
  return {
    header: "Message",
    cell: ({ row }) => <MessageLink message={row.original} />,
  };
}

export function dueColumn<T extends MessageSummary>(): ColumnDef<T> {
  return {
    header: "Due",
    meta: { width: "11rem" },
    cell: ({ row: { original } }) => (
      <>
        <Moment at={original.deliver_at} />
        <br />
        {original.state === "SCHEDULED" ? <Countdown at={original.deliver_at} /> : <Late ms={original.lateness_ms} />}
      </>
    ),
  };
}

export function connectionColumn<T extends MessageSummary>(): ColumnDef<T> {
  return {
    header: "Connection",
    meta: { from: "lg", width: "10rem" },
    cell: ({ row: { original } }) => (
      <>
        <Text overflowWrap="anywhere">{original.connection}</Text>
        <Text color="fg.muted" fontSize="xs">
          held by {original.held_by}
        </Text>
      </>
    ),
  };
}

export function originColumn<T extends MessageSummary>(): ColumnDef<T> {
  return {
    header: "Scheduled by",
    meta: { from: "md" },
    cell: ({ row }) => <TaskLink origin={row.original.origin} />,
  };
}

export const reasonColumn: ColumnDef<DeadLetter> = {
  header: "Reason",
  cell: ({ row: { original } }) => (
    <>
      <Text overflowWrap="anywhere">{original.reason ?? "not known"}</Text>
      <Text color="fg.muted" fontSize="xs">
        <Moment at={original.died_at} />
      </Text>
    </>
  ),
};

function MessageLink({ message }: { message: MessageSummary }): ReactNode {
  const connId = useConnId();
  return (
    <>
      <Link asChild color="fg.info" fontFamily="mono" fontSize="xs" overflowWrap="anywhere">
        <RouterLink to={messagePath(message.id, connId)}>{message.id}</RouterLink>
      </Link>
      <Text color="fg.muted" fontSize="xs" overflowWrap="anywhere">
        {message.channel}
      </Text>
    </>
  );
}

function Late({ ms }: { ms: number | null }): ReactNode {
  return ms === null ? null : <Text color="fg.muted">{ms < 0 ? `${describeSpan(ms)} early` : `${describeSpan(ms)} late`}</Text>;
}
