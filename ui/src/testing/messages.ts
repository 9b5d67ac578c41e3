import type { MessageDetail, MessageSummary } from "../api/client";

export function summary(changes: Partial<MessageSummary> = {}): MessageSummary {
  return {
    id: "order/1",
    channel: "reminders",
    state: "SCHEDULED",
    status: 100,
    deliver_at: "2126-01-01T00:00:00Z",
    scheduled_at: "2026-01-01T00:00:00Z",
    updated_at: "2026-01-01T00:00:00Z",
    dispatched_at: null,
    lateness_ms: null,
    overdue_ms: null,
    content_type: "application/json",
    priority: 0,
    key: null,
    handled_count: 0,
    generation: 1,
    connection: "delay_default",
    held_by: "ledger",
    origin: null,
    can_edit: true,
    link: "/v1/messages/order/1",
    ...changes,
  };
}

export function detail(changes: Partial<MessageDetail> = {}): MessageDetail {
  return {
    ...summary(),
    headers: {},
    payload: { size: 7, format: "json", content: '{"a":1}', is_truncated: false },
    task_link: null,
    is_awaited: false,
    warning: null,
    actions: ["cancel", "reschedule", "expedite"],
    can_download: true,
    ...changes,
  };
}

export function pageOf(messages: MessageSummary[], changes: object = {}) {
  return { messages, next: null, prev: null, links: { next: null, prev: null }, continuation: null, notice: null, ...changes };
}
