import { Button, Flex } from "@chakra-ui/react";

interface Props {
  prev: string | null;
  next: string | null;
  onTurn: (page: string) => void;
}

/** Turns pages by the tokens of the API. */
export function Pager({ prev, next, onTurn }: Props) {
  if (prev === null && next === null) {
    return null;
  }
  return (
    <Flex aria-label="Pages" as="nav" gap={2} justify="end" mt={3}>
      <Button disabled={prev === null} onClick={() => prev !== null && onTurn(prev)} size="sm" variant="outline">
        Previous
      </Button>
      <Button disabled={next === null} onClick={() => next !== null && onTurn(next)} size="sm" variant="outline">
        Next
      </Button>
    </Flex>
  );
}
