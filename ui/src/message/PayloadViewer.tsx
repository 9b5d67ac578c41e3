import { Box, Button, chakra, Flex, Tabs, Text } from "@chakra-ui/react";

import { apiUrl, type MessageDetail } from "../api/client";
import { useConnId } from "../api/queries";
import { withConnId } from "../layout/links";
import { bytesOf, hexDump, prettyJson } from "./bytes";

/** The beginning of a payload as JSON, text or bytes, and the whole of it as a file. */
export function PayloadViewer({ message }: { message: MessageDetail }) {
  const connId = useConnId();
  const { payload } = message;
  return (
    <>
      <Flex align="center" gap={3} justify="space-between" mb={2} wrap="wrap">
        <Text color="fg.muted" fontSize="sm">
          {payload.size.toLocaleString("en")} bytes, {message.content_type}
          {payload.is_truncated && ". Only the beginning is shown."}
        </Text>
        {message.can_download && (
          <Button asChild size="xs" variant="outline">
            <a download href={withConnId(apiUrl(`/v1/payload/${encodeURIComponent(message.id)}`), connId)}>
              Download
            </a>
          </Button>
        )}
      </Flex>
      {payload.format === "hidden" ? (
        <Text>Payloads are hidden by the configuration ([delay] show_payloads).</Text>
      ) : payload.size === 0 ? (
        <Text>The payload is empty.</Text>
      ) : (
        <Views views={viewsOf(message)} />
      )}
    </>
  );
}

interface View {
  name: string;
  content: string;
}

function viewsOf({ payload }: MessageDetail): View[] {
  const hex = { name: "Hex", content: hexDump(bytesOf(payload)) };
  const text = { name: "Text", content: payload.content ?? "" };
  if (payload.format === "base64") {
    return [hex];
  }
  const json = payload.format === "json" ? prettyJson(text.content) : null;
  return json === null ? [text, hex] : [{ name: "JSON", content: json }, text, hex];
}

function Views({ views }: { views: View[] }) {
  return (
    <Tabs.Root defaultValue={views[0]?.name} lazyMount size="sm" variant="line">
      <Tabs.List>
        {views.map(({ name }) => (
          <Tabs.Trigger key={name} value={name}>
            {name}
          </Tabs.Trigger>
        ))}
      </Tabs.List>
      {views.map(({ name, content }) => (
        <Tabs.Content key={name} value={name}>
          {name === "Hex" && views.length > 1 && (
            <Text color="fg.muted" fontSize="sm" mb={1}>
              The bytes of the text as it is shown here. Download the payload for its own bytes.
            </Text>
          )}
          <Box bg="bg.muted" borderRadius="md" maxH="24rem" overflow="auto" p={3}>
            <chakra.pre fontSize="xs" whiteSpace={name === "Text" ? "pre-wrap" : "pre"}>
              {content}
            </chakra.pre>
          </Box>
        </Tabs.Content>
      ))}
    </Tabs.Root>
  );
}
