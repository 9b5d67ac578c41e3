import { useSearchParams } from "react-router-dom";

/** Returns the token of the page in the address bar, and what turns to another page. */
export function usePage(): [page: string | undefined, turn: (token: string) => void] {
  const [params, setParams] = useSearchParams();
  const turn = (token: string) =>
    setParams((current) => {
      current.set("page", token);
      return current;
    });
  return [params.get("page") ?? undefined, turn];
}
