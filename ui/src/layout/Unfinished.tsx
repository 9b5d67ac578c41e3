import { Alert, Button } from "@chakra-ui/react";

interface Props {
  /** The token that continues the search; null if all is searched. */
  continuation: string | null;
  onTurn: (page: string) => void;
}

/** Says that a search has not seen everything yet, and continues it. */
export function Unfinished({ continuation, onTurn }: Props) {
  if (continuation === null) {
    return null;
  }
  return (
    <Alert.Root alignItems="center" mt={3} status="info">
      <Alert.Indicator />
      <Alert.Title flex="1">Not all messages are searched yet.</Alert.Title>
      <Button onClick={() => onTurn(continuation)} size="sm" variant="outline">
        Continue the search
      </Button>
    </Alert.Root>
  );
}
