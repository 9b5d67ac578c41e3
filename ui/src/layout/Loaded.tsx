import { Box, Skeleton, Stack } from "@chakra-ui/react";
import type { UseQueryResult } from "@tanstack/react-query";
import type { ReactNode } from "react";

import { ErrorState } from "./ErrorState";

interface Props<T> {
  query: UseQueryResult<T>;
  children: (data: T) => ReactNode;
}

/** Shows data that was read; a failed refresh keeps the last data and says so. */
export function Loaded<T>({ query, children }: Props<T>) {
  if (query.data === undefined) {
    return query.error === null ? <Loading /> : <ErrorState error={query.error} />;
  }
  return (
    <Stack gap={3}>
      {query.error !== null && <ErrorState error={query.error} />}
      <Box opacity={query.isPlaceholderData ? 0.6 : 1}>{children(query.data)}</Box>
    </Stack>
  );
}

function Loading() {
  return (
    <Stack aria-label="Loading" gap={2} role="status">
      <Skeleton height={6} />
      <Skeleton height={6} />
      <Skeleton height={6} width="60%" />
    </Stack>
  );
}
