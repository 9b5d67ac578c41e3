import { createToaster } from "@chakra-ui/react";

/** Screen readers announce what it shows. */
export const toaster = createToaster({ placement: "bottom-end", pauseOnPageIdle: true });
