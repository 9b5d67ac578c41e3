import { Button, Flex, Text } from "@chakra-ui/react";
import { useState } from "react";

import { ActionDialog } from "../actions/ActionDialog";
import type { Action } from "../actions/perform";
import { type ActionName, WORDINGS } from "../actions/wording";
import type { MessageFilter } from "../api/client";
import { useConnId } from "../api/queries";
import type { Selection } from "./MessageTable";

interface Props {
  actions: ActionName[];
  selection: Selection;
  /** Undefined if the actions change none of the listed messages. */
  filter: MessageFilter | undefined;
}

/** Offers actions on the selected messages, or on all that match the filter. */
export function SelectionBar({ actions, selection, filter }: Props) {
  const connId = useConnId();
  const [isAll, setIsAll] = useState(false);
  const [action, setAction] = useState<Action | null>(null);
  const { ids, onChange } = selection;
  const target = isAll && filter !== undefined ? { filter } : { ids };
  if (ids.length === 0 && !isAll) {
    return (
      <Flex align="center" gap={2} minH={10} wrap="wrap">
        <Text color="fg.muted" fontSize="sm">
          Select messages to change them.
        </Text>
        {filter !== undefined && <TakeAll onClick={() => setIsAll(true)} />}
      </Flex>
    );
  }
  const clear = () => {
    setIsAll(false);
    onChange([]);
  };
  return (
    <Flex align="center" gap={2} minH={10} wrap="wrap">
      <Text fontSize="sm" role="status">
        {isAll ? "All that match this filter:" : `${ids.length} selected:`}
      </Text>
      {actions.map((name) => (
        <Button
          key={name}
          onClick={() => setAction({ name, target, connId })}
          size="xs"
          variant="outline"
        >
          {WORDINGS[name].name}
        </Button>
      ))}
      {!isAll && filter !== undefined && <TakeAll onClick={() => setIsAll(true)} />}
      <Button onClick={clear} size="xs" variant="ghost">
        Clear selection
      </Button>
      {action !== null && <ActionDialog action={action} onClose={() => setAction(null)} onDone={clear} />}
    </Flex>
  );
}

function TakeAll({ onClick }: { onClick: () => void }) {
  return (
    <Button onClick={onClick} size="xs" variant="ghost">
      Select all that match this filter
    </Button>
  );
}
