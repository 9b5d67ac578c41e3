import { Box, Flex, Heading } from "@chakra-ui/react";
import { NavLink, Outlet } from "react-router-dom";

import { useConnId } from "../api/queries";
import { HOME, withConnId } from "./links";

const PAGES = [
  { path: HOME, label: "Overview" },
  { path: `${HOME}/messages?state=SCHEDULED`, label: "Messages" },
  { path: `${HOME}/retries`, label: "Spark retries" },
  { path: `${HOME}/dead-letters`, label: "Dead letters" },
];

export function Layout() {
  const connId = useConnId();
  return (
    <Box maxW="100%" p={{ base: 2, md: 4 }}>
      <Heading as="h1" size="xl">
        Delayed messages
      </Heading>
      <Flex aria-label="Delayed messages" as="nav" borderBottomWidth={1} gap={1} mb={4} mt={2} overflowX="auto">
        {PAGES.map(({ path, label }) => (
          <NavLink end={path === HOME} key={path} to={withConnId(path, connId)}>
            {({ isActive }) => (
              <Box
                borderBottomColor={isActive ? "brand.solid" : "transparent"}
                borderBottomWidth={3}
                color={isActive ? "fg" : "fg.muted"}
                fontWeight={isActive ? "semibold" : "normal"}
                px={3}
                py={2}
                whiteSpace="nowrap"
              >
                {label}
              </Box>
            )}
          </NavLink>
        ))}
      </Flex>
      <Outlet />
    </Box>
  );
}
