import { Toaster as ChakraToaster, Toast } from "@chakra-ui/react";
import { QueryClientProvider } from "@tanstack/react-query";
import { Navigate, Route, Routes } from "react-router-dom";

import { toaster } from "./actions/toaster";
import { queryClient } from "./api/queries";
import { DeadLettersPage } from "./deadLetters/DeadLettersPage";
import { Layout } from "./layout/Layout";
import { HOME } from "./layout/links";
import { MessagePage } from "./message/MessagePage";
import { MessagesPage } from "./messages/MessagesPage";
import { OverviewPage } from "./overview/OverviewPage";
import { RetriesPage } from "./retries/RetriesPage";
import { TaskTab } from "./taskTab/TaskTab";

/** Where the viewer is; Airflow passes it to plugins. */
interface Props {
  dagId?: string;
  runId?: string;
  taskId?: string;
  mapIndex?: string;
}

export function App({ dagId, runId, taskId, mapIndex }: Props) {
  return (
    <QueryClientProvider client={queryClient}>
      {dagId !== undefined && runId !== undefined && taskId !== undefined ? (
        <TaskTab dagId={dagId} mapIndex={mapIndex === undefined ? -1 : Number(mapIndex)} runId={runId} taskId={taskId} />
      ) : (
        <Pages />
      )}
      <ChakraToaster toaster={toaster}>
        {(toast) => (
          <Toast.Root width={{ base: "full", md: "sm" }}>
            <Toast.Indicator />
            <Toast.Title>{toast.title}</Toast.Title>
            <Toast.CloseTrigger />
          </Toast.Root>
        )}
      </ChakraToaster>
    </QueryClientProvider>
  );
}

function Pages() {
  return (
    <Routes>
      <Route element={<Layout />}>
        <Route element={<OverviewPage />} index />
        <Route element={<MessagesPage />} path="messages" />
        <Route element={<MessagePage />} path="messages/:messageId" />
        <Route element={<RetriesPage />} path="retries" />
        <Route element={<DeadLettersPage />} path="dead-letters" />
        <Route element={<Navigate replace to={HOME} />} path="*" />
      </Route>
    </Routes>
  );
}
