import type { TaskOrigin } from "../api/client";

/** The page in Airflow, as plugins/delay.py registers it. */
export const HOME = "/plugin/delayed-messages";

export function messagePath(id: string, connId?: string): string {
  return withConnId(`${HOME}/messages/${encodeURIComponent(id)}`, connId);
}

export function withConnId(path: string, connId?: string): string {
  if (connId === undefined) {
    return path;
  }
  return `${path}${path.includes("?") ? "&" : "?"}conn_id=${encodeURIComponent(connId)}`;
}

export function runPath({ dag_id, run_id }: TaskOrigin): string {
  return `/dags/${encodeURIComponent(dag_id)}/runs/${encodeURIComponent(run_id)}`;
}

export function taskPath(origin: TaskOrigin): string {
  const mapped = origin.map_index >= 0 ? `/mapped/${origin.map_index}` : "";
  return `${runPath(origin)}/tasks/${encodeURIComponent(origin.task_id)}${mapped}`;
}
