// The page: the bar at its top, the view that the address names, and the keys.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Choice, useKeys } from "./parts";
import { go, link, useRoute } from "./route";
import "./style.css";
import { Compare } from "./views/compare";
import { RunPage } from "./views/run";
import { Runs } from "./views/runs";

type Theme = "auto" | "light" | "dark";
const THEME = "rollwright-theme";

const KEYS: [string, string][] = [
  ["/", "search"],
  ["r", "all runs"],
  ["1 … 7", "views of a run"],
  ["j, k", "next and previous turn"],
  ["n, p", "next and previous episode"],
  ["t", "exact tokens"],
  ["g", "the group side by side"],
  ["f", "the forest"],
  ["?", "this list"],
];

function readTheme(): Theme {
  try {
    const kept = localStorage.getItem(THEME);
    return kept === "light" || kept === "dark" ? kept : "auto";
  } catch {
    return "auto";
  }
}

function Page() {
  const route = useRoute();
  const [theme, setTheme] = useState<Theme>(readTheme);
  const [help, setHelp] = useState(false);
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(THEME, theme);
    } catch {
      /* a browser without storage keeps the choice for this visit */
    }
  }, [theme]);
  useKeys({
    "/": () => document.getElementById("search")?.focus(),
    "?": () => setHelp(!help),
    Escape: () => setHelp(false),
    r: () => go(link([])),
  });
  const [kind, run] = route.parts;
  useEffect(() => {
    document.title = [route.parts[3] ?? route.parts[2], run, "rollwright"].filter(Boolean).join(" · ");
  }, [route]);
  return (
    <>
      <a class="skip" href="#app" onClick={(event) => { event.preventDefault(); document.querySelector<HTMLElement>("main")?.focus(); }}>skip to the content</a>
      <header class="top">
        <a class="brand" href={link([])}><img src="/icon.svg" alt="" width="22" height="22" /> rollwright</a>
        {kind === "run" && run && <nav class="crumbs" aria-label="place"><a href={link([])}>Runs</a> <span>/</span> <a href={link(["run", run])}>{run}</a></nav>}
        <div class="top-tools">
          <Choice label="theme" value={theme} options={[["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]]} onChange={setTheme} />
          <button type="button" aria-label="keys" aria-expanded={help} onClick={() => setHelp(!help)}>?</button>
        </div>
      </header>
      {help && (
        <aside class="help" role="dialog" aria-label="keys">
          <dl>{KEYS.map(([key, meaning]) => <div key={key}><dt><kbd>{key}</kbd></dt><dd>{meaning}</dd></div>)}</dl>
          <button type="button" onClick={() => setHelp(false)}>close</button>
        </aside>
      )}
      {kind === "run" && run ? <RunPage key={run} run={run} route={route} /> : kind === "compare" ? <Compare runs={route.parts.slice(1)} /> : <Runs />}
    </>
  );
}

const place = document.getElementById("app")!;
place.replaceChildren();
render(<Page />, place);
