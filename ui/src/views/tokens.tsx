// The exact tokens of a turn: those that its prompt adds, and those that were sampled, coloured by what was trained.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, type Maybe } from "../api";
import { num, signed } from "../format";
import { tint } from "../parts";

export type Tone = "advantage" | "logprob" | "version" | "mask";
export const TONES: [Tone, string][] = [["advantage", "Advantage"], ["logprob", "Log-probability"], ["version", "Version"], ["mask", "Loss mask"]];

interface TurnTokens {
  turn: number;
  note: Maybe<string>;
  prompt: { ids: number[]; text: string[]; left_out: number; before: number };
  sampled: { ids: number[]; text: string[]; logprobs: number[]; versions: number[]; mask: number; untrained: Maybe<string>; advantage: Maybe<number>; advantages: Maybe<number[]>; left_out: number };
}

/** Log-probability at which a token has the strongest colour: one in a hundred. */
const UNLIKELY = Math.log(0.01);
const PROMPT_SHOWN = 400;

function visible(text: string | undefined, id: number): string {
  if (text === undefined) return String(id);
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥") || "·";
}

export function Tokens({ run, rollout, turn, tone, strongest }: { run: string; rollout: string; turn: number; tone: Tone; strongest: number }) {
  const [data, setData] = useState<TurnTokens | null>(null);
  const [error, setError] = useState<string | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const [whole, setWhole] = useState(false);
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const abort = new AbortController();
    const load = () =>
      ask<TurnTokens>("tokens", { run, rollout, turn }, abort.signal).then(
        (found) => {
          setData(found.data);
          setError(found.error);
        },
        () => undefined,
      );
    const seen = new IntersectionObserver(
      (entries) => {
        if (entries.some((each) => each.isIntersecting)) {
          seen.disconnect();
          load();
        }
      },
      { rootMargin: "600px" },
    );
    if (place.current) seen.observe(place.current);
    return () => {
      abort.abort();
      seen.disconnect();
    };
  }, [run, rollout, turn]);
  if (!data) return <div class="tokens" ref={place}>{error ?? "reading the tokens …"}</div>;
  const { prompt, sampled } = data;
  const skipped = whole ? 0 : Math.max(0, prompt.ids.length - PROMPT_SHOWN);
  const versions = [...new Set(sampled.versions)].sort((a, b) => a - b);
  const of = (place: number) => sampled.advantages?.[place] ?? sampled.advantage;
  const scale = Math.max(strongest, ...(sampled.advantages ?? []).map(Math.abs));
  const background = (place: number): string | undefined => {
    if (tone === "mask") return sampled.mask ? tint(0.5) : undefined;
    if (tone === "version") return `hsl(${(210 + 67 * versions.indexOf(sampled.versions[place]!)) % 360} 70% 60% / 0.35)`;
    if (tone === "logprob") return sampled.logprobs[place] === undefined ? undefined : tint(-Math.min(1, sampled.logprobs[place]! / UNLIKELY));
    const advantage = of(place);
    return !sampled.mask || advantage === null || advantage === undefined ? undefined : tint(advantage / scale);
  };
  return (
    <div class="tokens" ref={place}>
      {data.note && <p class="note">{data.note}</p>}
      <div class="token-run prompt" aria-label="tokens that the prompt adds">
        {prompt.before > 0 && <span class="faded">{num(prompt.before)} tokens of the turn before · </span>}
        {skipped > 0 && <button type="button" class="more" onClick={() => setWhole(true)}>{num(skipped)} earlier tokens of the prompt</button>}
        {prompt.ids.slice(skipped).map((id, place) => (
          <span key={place} class="token" title={`id ${id} · prompt, mask 0`}>{visible(prompt.text[skipped + place], id)}</span>
        ))}
      </div>
      <div class="token-run sampled" aria-label="sampled tokens" onMouseLeave={() => setAt(null)}>
        {sampled.ids.map((id, place) => (
          <span
            key={place}
            class={sampled.mask ? "token" : "token untrained"}
            style={{ background: background(place) }}
            title={`id ${id} · log-probability ${num(sampled.logprobs[place])} · version ${sampled.versions[place] ?? "–"} · mask ${sampled.mask} · advantage ${signed(of(place))}`}
            onMouseEnter={() => setAt(place)}
          >
            {visible(sampled.text[place], id)}
          </span>
        ))}
        {sampled.left_out > 0 && <span class="faded"> and {num(sampled.left_out)} more</span>}
      </div>
      <p class="token-facts" aria-live="off">
        {at === null ? (
          <>
            {num(sampled.ids.length)} sampled tokens · mean log-probability {num(mean(sampled.logprobs))} · {versions.length ? `version ${versions.join(", ")}` : "no version"} · {sampled.mask ? `trained with advantage ${signed(sampled.advantage)}` : `not trained: ${sampled.untrained}`}
          </>
        ) : (
          <>
            id {sampled.ids[at]} · log-probability {num(sampled.logprobs[at])} (p {num(Math.exp(sampled.logprobs[at] ?? 0))}) · version {sampled.versions[at] ?? "–"} · mask {sampled.mask} · advantage {signed(of(at))}
          </>
        )}
      </p>
    </div>
  );
}

function mean(values: number[]): Maybe<number> {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}
