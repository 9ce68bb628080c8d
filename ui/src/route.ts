// The address behind `#`: every view and every turn has one, so that a link can be shared.
import { useEffect, useState } from "preact/hooks";
import type { Dict, Maybe } from "./api";

export interface Route {
  parts: string[];
  query: URLSearchParams;
}

function read(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function useRoute(): Route {
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

export function link(parts: (string | number)[], query: Dict<Maybe<string | number>> = {}): string {
  const asked = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value !== null && value !== undefined && value !== "") asked.set(key, String(value));
  const rest = asked.toString();
  return `#/${parts.map((part) => encodeURIComponent(String(part))).join("/")}${rest ? `?${rest}` : ""}`;
}

export function go(to: string, replace = false): void {
  if (replace) {
    history.replaceState(null, "", to);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = to.slice(1);
}
