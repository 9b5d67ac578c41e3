import { Box, Button, Dialog, List, Portal, Spinner, Text } from "@chakra-ui/react";
import { useMutation, useQuery } from "@tanstack/react-query";
import { useRef, useState } from "react";

import type { ActionResult } from "../api/client";
import { queryClient } from "../api/queries";
import { ErrorState } from "../layout/ErrorState";
import { NewTimeFields } from "./NewTimeFields";
import { type Action, count, type NewTime, perform } from "./perform";
import { toaster } from "./toaster";
import { countOf, type Wording, WORDINGS } from "./wording";

const SHOWN_REFUSALS = 10;
const DEFAULT_TIME: NewTime = { deliver_after: 600 };

interface Props {
  action: Action;
  wording?: Wording;
  onClose: () => void;
  /** Called after messages were changed. */
  onDone?: () => void;
}

/** Counts what an action would change, asks for confirmation, and says what it did. */
export function ActionDialog({ action, wording = WORDINGS[action.name], onClose, onDone }: Props) {
  const [newTime, setNewTime] = useState<NewTime | null>(DEFAULT_TIME);
  const [progress, setProgress] = useState(0);
  const backButton = useRef<HTMLButtonElement>(null);
  const dryRun = useQuery({
    queryKey: ["dry-run", action],
    queryFn: () => count(action, DEFAULT_TIME),
    gcTime: 0,
    refetchInterval: false,
    refetchOnWindowFocus: false,
    retry: false,
  });
  const run = useMutation({
    mutationFn: () => perform(action, newTime ?? DEFAULT_TIME, setProgress),
    onSuccess: (result) => {
      if (result.changed > 0) {
        toaster.success({ title: `${countOf(wording, result.changed)} ${wording.done}.` });
        onDone?.();
      }
      if (result.refused.length === 0) {
        onClose();
      }
    },
    // Everything is read again, but not the count in this dialog.
    onSettled: () => queryClient.invalidateQueries({ predicate: ({ queryKey }) => queryKey[0] !== "dry-run" }),
  });

  const canConfirm = newTime !== null && (dryRun.data?.matched ?? 0) > 0 && !run.isPending && run.data === undefined;
  return (
    <Dialog.Root
      initialFocusEl={() => backButton.current}
      onOpenChange={({ open }) => !open && !run.isPending && onClose()}
      open
      role="alertdialog"
    >
      <Portal>
        <Dialog.Backdrop />
        <Dialog.Positioner>
          <Dialog.Content maxW="lg" mx={3}>
            <Dialog.Header>
              <Dialog.Title>{wording.name}</Dialog.Title>
            </Dialog.Header>
            <Dialog.Body display="flex" flexDirection="column" gap={3}>
              <Box aria-live="polite">
                {dryRun.isPending && (
                  <Text>
                    <Spinner size="sm" /> Counting…
                  </Text>
                )}
                {dryRun.error !== null && run.error === null && <ErrorState error={dryRun.error} />}
                {dryRun.data !== undefined && <Question result={dryRun.data} wording={wording} />}
              </Box>
              {action.name === "reschedule" && <NewTimeFields onChange={setNewTime} />}
              {run.isPending && progress > 0 && <Text>{countOf(wording, progress)} so far…</Text>}
              {run.error !== null && <ErrorState error={run.error} />}
              {run.data !== undefined && <Refusals result={run.data} wording={wording} />}
            </Dialog.Body>
            <Dialog.Footer>
              <Button disabled={run.isPending} onClick={onClose} ref={backButton} variant="outline">
                {run.data === undefined ? "Back" : "Close"}
              </Button>
              {run.data === undefined && (
                <Button
                  colorPalette={wording.isDestructive ? "red" : "brand"}
                  disabled={!canConfirm}
                  loading={run.isPending}
                  onClick={() => run.mutate()}
                >
                  {wording.confirm}
                  {dryRun.data !== undefined && ` ${countOf(wording, dryRun.data.matched, dryRun.data.is_exact)}`}
                </Button>
              )}
            </Dialog.Footer>
          </Dialog.Content>
        </Dialog.Positioner>
      </Portal>
    </Dialog.Root>
  );
}

function Question({ result, wording }: { result: ActionResult; wording: Wording }) {
  if (result.matched === 0) {
    return <Text>There is nothing that you can change: the state has changed meanwhile, or you may not do this.</Text>;
  }
  const what = countOf(wording, result.matched, result.is_exact);
  return (
    <Text>
      This concerns <strong>{what}</strong>. {wording.effect}
    </Text>
  );
}

function Refusals({ result, wording }: { result: ActionResult; wording: Wording }) {
  const hidden = result.refused.length - SHOWN_REFUSALS;
  return (
    <Box role="alert">
      <Text>
        {countOf(wording, result.changed)} {wording.done}, {result.refused.length} not:
      </Text>
      <List.Root fontSize="sm" ps={5}>
        {result.refused.slice(0, SHOWN_REFUSALS).map(({ id, detail }) => (
          <List.Item key={id} overflowWrap="anywhere">
            {id}: {detail}
          </List.Item>
        ))}
        {hidden > 0 && <List.Item>and {hidden.toLocaleString("en")} more</List.Item>}
      </List.Root>
    </Box>
  );
}
