import { Box, Text } from "@chakra-ui/react";
import type { ReactNode } from "react";

export function EmptyState({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <Box borderRadius="md" borderStyle="dashed" borderWidth={1} px={4} py={8} textAlign="center">
      <Text fontWeight="semibold">{title}</Text>
      <Text color="fg.muted">{children}</Text>
    </Box>
  );
}
