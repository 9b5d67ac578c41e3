import { vi } from "vitest";

export interface Call {
  method: string;
  path: string;
  query: URLSearchParams;
  headers: Headers;
  body: unknown;
}

type Answer = { status?: number; body: unknown };

/** Answers calls of the API by the end of their path. Returns the calls that were made. */
export function fakeApi(answers: Record<string, (call: Call) => Answer>): Call[] {
  const calls: Call[] = [];
  vi.spyOn(globalThis, "fetch").mockImplementation(async (input) => {
    const request = input as Request;
    const url = new URL(request.url);
    const text = await request.text();
    const path = decodeURIComponent(url.pathname.replace(/^.*\/delay\/v1/, ""));
    const body: unknown = text === "" ? undefined : JSON.parse(text);
    const call = { method: request.method, path, query: url.searchParams, headers: request.headers, body };
    calls.push(call);
    const answer = answers[path]?.(call) ?? problem(404, `no answer for ${path}`);
    return Response.json(answer.body, { status: answer.status ?? 200 });
  });
  return calls;
}

export function problem(status: number, detail: string): Answer {
  return { status, body: { type: "about:blank", title: `Problem ${status}`, status, detail } };
}
