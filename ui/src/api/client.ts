import createClient, { type Middleware } from "openapi-fetch";

import { noteServerTime } from "../time/clock";
import type { components, paths } from "./schema";

type Schemas = components["schemas"];
export type ActionResult = Schemas["ActionResult"];
export type BrokerStatus = Schemas["BrokerStatus"];
export type Circuit = Schemas["Circuit"];
export type Counts = Schemas["Counts"];
export type DeadLetter = Schemas["DeadLetter"];
export type DispatcherStatus = Schemas["DispatcherStatus"];
export type HealthProblem = Schemas["HealthProblem"];
export type HistoryEntry = Schemas["HistoryEntry"];
export type MessageDetail = Schemas["MessageDetail"];
export type MessageFilter = Schemas["MessageFilter"];
export type MessageSummary = Schemas["MessageSummary"];
export type PayloadPreview = Schemas["PayloadPreview"];
export type Problem = Schemas["Problem"];
export type Retry = Schemas["Retry"];
export type SeriesPoint = Schemas["SeriesPoint"];
export type SparkAttempt = Schemas["SparkAttempt"];
export type SparkAttempts = Schemas["SparkAttempts"];
export type StateName = MessageSummary["state"];
export type TaskOrigin = Schemas["TaskOrigin"];

/** Airflow may run under a path such as /team-a; its pages have that path in <base>. */
export function apiUrl(path = ""): string {
  return new URL(`delay${path}`, document.baseURI).href;
}

/** An answer that is not the wanted one, in the words of the API. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    detail: string,
  ) {
    super(detail);
  }
}

const common: Middleware = {
  onRequest({ request }) {
    if (request.method !== "GET") {
      // Pages of other sites cannot send it.
      request.headers.set("X-Requested-With", "airflow-delay");
    }
    return request;
  },
  onResponse({ response }) {
    noteServerTime(response.headers.get("Date"));
  },
};

// A function, so that tests can replace fetch.
export const client = createClient<paths>({ baseUrl: apiUrl(), fetch: (request) => fetch(request) });
client.use(common);

/** Returns the data of an answer, or throws the problem that it describes. */
export async function unwrap<T>(call: Promise<{ data?: T; error?: unknown; response: Response }>): Promise<T> {
  const { data, error, response } = await call.catch(() => {
    throw new ApiError(0, "No connection", "Airflow does not answer. This page tries again every few seconds.");
  });
  if (data !== undefined && response.ok) {
    return data;
  }
  const problem = (typeof error === "object" ? error : {}) as Partial<Problem>;
  const title = problem.title ?? `Error ${response.status}`;
  throw new ApiError(response.status, title, describe(problem.detail) ?? response.statusText);
}

/** Airflow's own checks answer with a list or object as detail. */
function describe(detail: unknown): string | undefined {
  return detail === undefined || typeof detail === "string" ? detail : JSON.stringify(detail);
}
