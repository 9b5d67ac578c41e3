import { Box, Skeleton, Stack } from "@chakra-ui/react";
import type { UseQueryResult } from "@tanstack/react-query";
import type { ReactNode } from "react";

import { ErrorState } from "./ErrorState";

interface Props<T> {
  query: UseQueryResult<T>;
  children: (data: T) => ReactNode;
  /** Where several parts of a page fail for one reason, the page says it once. */
  isErrorShownElsewhere?: boolean;
}

/** Shows data that was read; a failed refresh keeps the last data and says so. */
export function Loaded<T>({ query, children, isErrorShownElsewhere = false }: Props<T>) {
  const error = query.error === null || isErrorShownElsewhere ? null : <ErrorState error={query.error} />;
  if (query.data === undefined) {
    return query.error === null ? <Loading /> : error;
  }
  return (
    <Stack gap={3}>
      {error}
      <Box opacity={query.isPlaceholderData || query.error !== null ? 0.6 : 1}>{children(query.data)}</Box>
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
