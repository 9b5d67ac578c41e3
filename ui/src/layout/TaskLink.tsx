import { Link, Text } from "@chakra-ui/react";
import { Link as RouterLink } from "react-router-dom";

import type { TaskOrigin } from "../api/client";
import { runPath, taskPath } from "./links";

/** The task instance that scheduled a message, with links to its page and to its run. */
export function TaskLink({ origin }: { origin: TaskOrigin | null }) {
  if (origin === null) {
    return <Text color="fg.muted">none</Text>;
  }
  const mapped = origin.map_index >= 0 ? ` [${origin.map_index}]` : "";
  return (
    <Text overflowWrap="anywhere">
      <Link asChild color="fg.info">
        <RouterLink to={taskPath(origin)}>
          {origin.dag_id} › {origin.task_id}
          {mapped}
        </RouterLink>
      </Link>{" "}
      <Link asChild color="fg.muted" fontSize="xs">
        <RouterLink to={runPath(origin)}>{origin.run_id}</RouterLink>
      </Link>
    </Text>
  );
}
