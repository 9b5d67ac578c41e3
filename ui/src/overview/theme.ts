import { useSyncExternalStore } from "react";

/** Returns "light" or "dark", as Airflow sets it on the page. */
export function useTheme(): string {
  return useSyncExternalStore(subscribe, () => (document.documentElement.classList.contains("dark") ? "dark" : "light"));
}

function subscribe(listener: () => void): () => void {
  const observer = new MutationObserver(listener);
  observer.observe(document.documentElement, { attributeFilter: ["class"] });
  return () => observer.disconnect();
}

/** Returns a colour of the theme, such as "blue.solid", in a form that a canvas understands. */
export function colourOf(token: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--chakra-colors-${token.replace(".", "-")}`);
}
