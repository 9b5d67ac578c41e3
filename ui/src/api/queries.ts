import { keepPreviousData, QueryClient, useQuery } from "@tanstack/react-query";
import { useSearchParams } from "react-router-dom";

import { ApiError, client, unwrap } from "./client";

const REFRESH_MS = 4000;
/** A dispatcher is missed 12 s after it died, and the page says so within 15 s. */
const HEALTH_MS = 2000;
/** How many pages of a search are read before one that has something is shown. */
const MOST_PAGES = 40;
export type Range = "hour" | "day" | "month";

/** The tasks, messages or retries of one DAG, run or task; undefined selects all. */
export interface TaskFilter {
  dag_id?: string;
  run_id?: string;
  task_id?: string;
  map_index?: number;
}

// Airflow mounts a plugin again on each change of the path; what was read stays here.
export const queryClient = new QueryClient({
  defaultOptions: {
    queries: {
      // In a hidden tab this pauses.
      refetchInterval: REFRESH_MS,
      retry: (count, error) => count < 1 && (!(error instanceof ApiError) || error.status >= 500),
      networkMode: "always",
    },
    mutations: { networkMode: "always" },
  },
});

/** Returns the connection whose ledger is shown; undefined is the configured ledger. */
export function useConnId(): string | undefined {
  const [params] = useSearchParams();
  return params.get("conn_id") ?? undefined;
}

export function useCounts() {
  const conn_id = useConnId();
  return useQuery({
    queryKey: ["counts", conn_id],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/counts", { params: { query: { conn_id } }, signal })),
  });
}

export function useHealth() {
  const conn_id = useConnId();
  return useQuery({
    queryKey: ["health", conn_id],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/health", { params: { query: { conn_id } }, signal })),
    refetchInterval: HEALTH_MS,
  });
}

export function useSeries(range: Range) {
  const conn_id = useConnId();
  return useQuery({
    queryKey: ["series", conn_id, range],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/series", { params: { query: { conn_id, range } }, signal })),
    placeholderData: keepPreviousData,
  });
}

export function useUpcoming(range: Range) {
  const conn_id = useConnId();
  return useQuery({
    queryKey: ["upcoming", conn_id, range],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/upcoming", { params: { query: { conn_id, range } }, signal })),
    placeholderData: keepPreviousData,
  });
}

export function useChannels() {
  const conn_id = useConnId();
  return useQuery({
    queryKey: ["channels", conn_id],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/channels", { params: { query: { conn_id } }, signal })),
    refetchInterval: 60_000,
  });
}

/**
 * A page of a search may end before it has found anything; this reads on until a page has something.
 * `pagesRead` tells how many pages that took.
 */
async function searchOn<T extends { continuation: string | null }>(
  read: (page?: string) => Promise<T>,
  lengthOf: (answer: T) => number,
  page?: string,
): Promise<T & { pagesRead: number }> {
  let answer = await read(page);
  let pagesRead = 1;
  while (lengthOf(answer) === 0 && answer.continuation !== null && pagesRead < MOST_PAGES) {
    answer = await read(answer.continuation);
    pagesRead += 1;
  }
  return { ...answer, pagesRead };
}

/** Reads a page of a list; a search of many pages is not repeated by itself. */
function useList<T extends { continuation: string | null }>(
  key: unknown[],
  read: (page: string | undefined, signal: AbortSignal) => Promise<T>,
  lengthOf: (answer: T) => number,
  page?: string,
) {
  return useQuery({
    queryKey: [...key, page],
    queryFn: ({ signal }) => searchOn((token) => read(token, signal), lengthOf, page),
    placeholderData: keepPreviousData,
    refetchInterval: ({ state }) => ((state.data?.pagesRead ?? 1) > 1 ? false : REFRESH_MS),
  });
}

export function useMessages({ page, ...query }: MessagesQuery) {
  const conn_id = useConnId();
  return useList(
    ["messages", conn_id, query],
    (page, signal) => unwrap(client.GET("/v1/messages", { params: { query: { conn_id, ...query, page } }, signal })),
    ({ messages }) => messages.length,
    page,
  );
}

export interface MessagesQuery extends TaskFilter {
  state?: string[];
  channel?: string;
  connection?: string;
  due_from?: string;
  due_to?: string;
  search?: string;
  page?: string;
}

export function useDeadLetters({ page, ...query }: Omit<MessagesQuery, "state">) {
  const conn_id = useConnId();
  return useList(
    ["dead-letters", conn_id, query],
    (page, signal) => unwrap(client.GET("/v1/dead-letters", { params: { query: { conn_id, ...query, page } }, signal })),
    ({ messages }) => messages.length,
    page,
  );
}

export function useMessage(message_id: string) {
  const conn_id = useConnId();
  const params = { path: { message_id }, query: { conn_id } };
  return useQuery({
    queryKey: ["message", conn_id, message_id],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/messages/{message_id}", { params, signal })),
  });
}

export function useHistory(message_id: string) {
  const conn_id = useConnId();
  const params = { path: { message_id }, query: { conn_id } };
  return useQuery({
    queryKey: ["history", conn_id, message_id],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/history/{message_id}", { params, signal })),
  });
}

export function useRetries({ page, ...query }: TaskFilter & { page?: string }) {
  const conn_id = useConnId();
  return useList(
    ["retries", conn_id, query],
    (page, signal) => unwrap(client.GET("/v1/retries", { params: { query: { conn_id, ...query, page } }, signal })),
    ({ retries }) => retries.length,
    page,
  );
}

export function useAttempts(query: { dag_id: string; run_id: string; task_id: string; map_index: number }) {
  return useQuery({
    queryKey: ["attempts", query],
    queryFn: ({ signal }) => unwrap(client.GET("/v1/attempts", { params: { query }, signal })),
  });
}
