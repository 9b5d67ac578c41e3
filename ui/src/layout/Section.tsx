import { Box, Flex, Heading } from "@chakra-ui/react";
import { type ReactNode, useId } from "react";

interface Props {
  title: string;
  /** Shown beside the title. */
  controls?: ReactNode;
  children: ReactNode;
}

export function Section({ title, controls, children }: Props) {
  const id = useId();
  return (
    <Box aria-labelledby={id} as="section" minW={0}>
      <Flex align="center" gap={3} justify="space-between" mb={2} wrap="wrap">
        <Heading as="h2" id={id} size="md">
          {title}
        </Heading>
        {controls}
      </Flex>
      {children}
    </Box>
  );
}
