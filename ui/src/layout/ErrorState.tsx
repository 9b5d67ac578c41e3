import { Alert, Link } from "@chakra-ui/react";

import { ApiError } from "../api/client";

/** Says what went wrong in the words of the API. */
export function ErrorState({ error }: { error: Error }) {
  const status = error instanceof ApiError ? error.status : undefined;
  return (
    <Alert.Root role="alert" status={status === 403 ? "warning" : "error"}>
      <Alert.Indicator />
      <Alert.Content>
        <Alert.Title>{titleOf(error)}</Alert.Title>
        <Alert.Description>{error.message}</Alert.Description>
      </Alert.Content>
      {status === 401 && (
        <Link alignSelf="center" href={signInUrl()} variant="underline">
          Sign in
        </Link>
      )}
    </Alert.Root>
  );
}

function titleOf(error: Error): string {
  if (!(error instanceof ApiError)) {
    return "Something went wrong";
  }
  switch (error.status) {
    case 401:
      return "You are signed out";
    case 403:
      return "You may not see this";
    case 404:
      return "Not found";
    default:
      return error.title;
  }
}

function signInUrl(): string {
  return new URL(`api/v2/auth/login?next=${encodeURIComponent(location.href)}`, document.baseURI).href;
}
