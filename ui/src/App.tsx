import { Heading, Text } from "@chakra-ui/react";

/** What Airflow passes to a plugin. */
interface Props {
  dagId?: string;
  runId?: string;
  taskId?: string;
  mapIndex?: string;
}

export function App({ dagId, runId, taskId, mapIndex }: Props) {
  return (
    <>
      <Heading>Delayed messages</Heading>
      <Text>{JSON.stringify({ dagId, runId, taskId, mapIndex })}</Text>
    </>
  );
}
