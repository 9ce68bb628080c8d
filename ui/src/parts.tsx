// Small parts that several views share.
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import type { Maybe } from "./api";
import { percent } from "./format";

export function Tile({ name, value, beside, children }: { name: string; value?: ComponentChildren; beside?: ComponentChildren; children?: ComponentChildren }) {
  return (
    <div class="tile">
      <div class="tile-name">{name}</div>
      {value !== undefined && <div class="tile-value">{value}</div>}
      {beside && <div class="tile-beside">{beside}</div>}
      {children}
    </div>
  );
}

export function Section({ title, beside, children, id }: { title: string; beside?: ComponentChildren; children: ComponentChildren; id?: string }) {
  return (
    <section class="section" aria-label={title} id={id}>
      <header>
        <h2>{title}</h2>
        {beside && <div class="beside">{beside}</div>}
      </header>
      {children}
    </section>
  );
}

export function State({ state }: { state: string }) {
  return <span class={`state state-${state}`}>{state}</span>;
}

export function Solved({ share }: { share: Maybe<number> }) {
  if (share === null || share === undefined) return <span class="faded">–</span>;
  if (share >= 1) return <span class="good">solved</span>;
  return share <= 0 ? <span class="bad">not solved</span> : <span>{percent(share)} solved</span>;
}

export function Problems({ lines }: { lines: Maybe<string[]> }) {
  if (!lines?.length) return null;
  return (
    <div class="problems" role="alert">
      <strong>{lines.length === 1 ? "Something is wrong with this run" : `${lines.length} things are wrong with this run`}</strong>
      <ul>
        {lines.map((line) => (
          <li key={line}>{line}</li>
        ))}
      </ul>
    </div>
  );
}

export function Notes({ lines }: { lines: Maybe<string[]> }) {
  if (!lines?.length) return null;
  return <p class="note">{lines.join(" · ")}</p>;
}

export function Loading({ error, indexing, what = "loading" }: { error?: Maybe<string>; indexing?: Maybe<number>; what?: string }) {
  if (error) return <p class="failure" role="alert">{error}</p>;
  if (indexing !== null && indexing !== undefined) return <p class="loading">reading the trajectory log: {percent(indexing)} …</p>;
  return <p class="loading">{what} …</p>;
}

export function Choice<T extends string>({ label, value, options, onChange }: { label: string; value: T; options: [T, string][]; onChange: (value: T) => void }) {
  return (
    <div class="choice" role="group" aria-label={label}>
      {options.map(([name, shown]) => (
        <button key={name} type="button" aria-pressed={value === name} onClick={() => onChange(name)}>
          {shown}
        </button>
      ))}
    </div>
  );
}

/** Text that is typed, given on after a short rest. */
export function Typed({ label, value, onChange, id, wide }: { label: string; value: string; onChange: (value: string) => void; id?: string; wide?: boolean }) {
  const [typed, setTyped] = useState(value);
  useEffect(() => setTyped(value), [value]);
  useEffect(() => {
    if (typed === value) return;
    const timer = setTimeout(() => onChange(typed), 250);
    return () => clearTimeout(timer);
  }, [typed]);
  return <input id={id} class={wide ? "wide" : ""} type="search" aria-label={label} placeholder={label} value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />;
}

export function CopyLink({ to, label }: { to: string; label: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(location.origin + location.pathname + to);
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    } catch {
      location.hash = to.slice(1);
    }
  };
  return (
    <button type="button" class="copy" aria-label={label} title={label} onClick={copy}>
      {copied ? "copied" : "link"}
    </button>
  );
}

const TYPING = new Set(["INPUT", "TEXTAREA", "SELECT"]);

/** Calls the function of a pressed key, unless something is being typed. */
export function useKeys(keys: Record<string, () => void>): void {
  useLayoutEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || TYPING.has((event.target as HTMLElement).tagName)) return;
      const act = keys[event.key];
      if (act) {
        event.preventDefault();
        act();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}

/** Colour of a number on a scale from -1 (bad) over 0 to 1 (good), as a background. */
export function tint(share: number): string {
  if (Math.abs(share) < 1e-6) return "transparent";
  const size = Math.min(1, Math.abs(share));
  const hue = share >= 0 ? "var(--good-rgb)" : "var(--bad-rgb)";
  return `rgba(${hue}, ${(0.1 + 0.6 * size).toFixed(2)})`;
}
