// Curves of a run: what it learned, how the trainer fared, how long each part took; validations by tag; before and after.
import { useState } from "preact/hooks";
import { ask, type Columns, type Curves, type Dict, type Episode, type Maybe, type Row, useAsk, type Validation } from "../api";
import { Histogram, LineChart, type Series, Stacked } from "../charts";
import { count, num, percent } from "../format";
import { Choice, Loading, Section, Solved } from "../parts";
import { link } from "../route";
import { boardIn, Board } from "../board";
import { useEffect } from "preact/hooks";

interface Training {
  batches: Curves;
  trainer: Columns;
  staleness: Dict<number>;
  split: Maybe<Dict<number>>;
  pruned_steps: number;
}

export type Over = "step" | "tokens" | "seconds";
export const OVERS: [Over, string][] = [["step", "Steps"], ["tokens", "Tokens"], ["seconds", "Time"]];
export const OVER_NAMES: Record<Over, string> = { step: "step", tokens: "sampled tokens", seconds: "seconds waited for batches" };

const TRAINER: [string, [string, string][], boolean?][] = [
  ["Entropy", [["entropy", "entropy"]]],
  ["Probability ratio", [["ratio", "mean"], ["ratio_max", "largest"]]],
  ["Share of clipped tokens", [["clip_share", "clipped"]], true],
  ["Gap between engine and trainer", [["gap", "mean |Δ log p|"], ["gap_max", "largest"]]],
  ["Loss", [["loss", "loss"]]],
  ["Gradient norm", [["grad_norm", "before clipping"]]],
  ["Divergence from the base model", [["divergence", "divergence"]]],
  ["Learning rate", [["learning_rate", "learning rate"]]],
  ["Trained tokens", [["tokens", "tokens"]]],
  ["Tokens per second", [["tokens_per_second", "trainer"]]],
  ["Length of rollouts", [["length/generated", "generated"], ["length/trained", "trained"]]],
];

const PARTS = ["rollout", "train", "update", "validate", "checkpoint"];

export function TrainingView({ run }: { run: string }) {
  const { data, error } = useAsk<Training>("training", { run }, 2500);
  const [over, setOver] = useState<Over>("step");
  if (!data) return <Loading error={error} />;
  const { train, validation } = data.batches;
  const x = train[over] ?? [];
  const curve = (name: string, key: string, tone?: number): Series => ({ name, x, y: train[key] ?? [], tone });
  const tags = Object.keys(train).filter((key) => key.startsWith("success ") && train[key]!.some((each) => each !== null)).map((key) => key.slice(8));
  const along = (step: number) => (over === "step" ? step : (train[over]?.[(train.step ?? []).findIndex((each) => (each ?? 0) >= step)] ?? train[over]?.[train[over]!.length - 1] ?? null));
  const validated = (read: (each: Validation) => Maybe<number>): Series => ({ name: "validation", x: validation.map((each) => along(each.step)), y: validation.map(read), tone: 1, dots: true });
  const split = data.split ?? null;
  const trainerX = data.trainer.step ?? [];
  return (
    <>
      <div class="bar">
        <Choice label="curves over" value={over} options={OVERS} onChange={setOver} />
        {data.pruned_steps > 0 && <span class="beside">the first {num(data.pruned_steps)} steps were removed</span>}
      </div>
      <div class="charts">
        <LineChart title="Reward" xName={OVER_NAMES[over]} series={[{ ...curve("batches", "reward", 0), name: "training batches" }, validated((each) => each.reward)]} />
        <LineChart title="Solved" share xName={OVER_NAMES[over]} series={[{ ...curve("batches", "success", 0), name: "training batches" }, validated((each) => each.success)]} />
        {tags.length > 1 && <LineChart title="Solved by environment" share xName={OVER_NAMES[over]} series={tags.map((tag) => curve(tag, `success ${tag}`))} />}
        <LineChart title="Turns of an episode" xName={OVER_NAMES[over]} series={[curve("turns", "turns")]} />
        <LineChart title="Sampled tokens of an episode" xName={OVER_NAMES[over]} series={[curve("tokens", "length")]} />
        <LineChart title="Mean staleness, in versions" xName={OVER_NAMES[over]} series={[curve("staleness", "staleness")]} />
        {TRAINER.map(([title, keys, share]) => (
          <LineChart key={title} title={title} share={share} xName="step" series={keys.filter(([key]) => data.trainer[key]).map(([key, name]) => ({ name, x: trainerX, y: data.trainer[key]! }))} />
        ))}
        <LineChart title="Time of each part, summed" xName="step" series={PARTS.filter((part) => data.trainer[`time/${part}`]?.some((each) => each)).map((part) => ({ name: part, x: trainerX, y: data.trainer[`time/${part}`]! }))} />
      </div>
      <div class="columns">
        {split && Object.values(split).some((each) => each > 0) && (
          <Section title="Where the time went">
            <Stacked label="seconds by part" parts={PARTS.filter((part) => split[part]).map((part, place) => ({ name: part, count: Math.round(split[part]!), tone: `part${place}` }))} />
          </Section>
        )}
        {Object.keys(data.staleness).length > 0 && (
          <Section title="Staleness">
            <Histogram title="tokens by age in policy versions at hand-over" unit="tokens" counts={Object.entries(data.staleness)} />
          </Section>
        )}
      </div>
      {validation.length > 0 && <Validations rows={validation} />}
      {validation.length > 1 && <BeforeAfter run={run} />}
    </>
  );
}

export function Validations({ rows }: { rows: Validation[] }) {
  const tags = [...new Set(rows.flatMap((row) => Object.keys(row.tags)))];
  return (
    <Section title="Validation by environment" beside="solved, with 95 % intervals">
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th class="right">after step</th>
              <th class="right">reward</th>
              {tags.map((tag) => <th key={tag}>{tag}</th>)}
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.step}>
                <td class="right">{num(row.step)}</td>
                <td class="right">{num(row.reward)}</td>
                {tags.map((tag) => {
                  const each = row.tags[tag];
                  return (
                    <td key={tag}>
                      {each ? <Interval share={each.success} interval={each.interval} count={each.episodes} /> : "–"}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

export function Interval({ share, interval, count: of }: { share: Maybe<number>; interval: Maybe<[number, number]>; count?: Maybe<number> }) {
  if (share === null || share === undefined) return <span class="faded">–</span>;
  return (
    <span class="interval">
      <b>{percent(share, 1)}</b>
      {interval && (
        <>
          <span class="faded"> {percent(interval[0])}–{percent(interval[1])}{of ? ` of ${num(of)}` : ""}</span>
          <span class="interval-bar" aria-hidden="true">
            <i style={{ left: `${100 * interval[0]}%`, width: `${100 * (interval[1] - interval[0])}%` }} />
            <b style={{ left: `${100 * share}%` }} />
          </span>
        </>
      )}
    </span>
  );
}

interface Pairs {
  pairs: { before: Row; after: Row }[];
  first: number;
  last: number;
  total: number;
  indexed: number;
}

const SHOWN = 8;

function BeforeAfter({ run }: { run: string }) {
  const { data } = useAsk<Pairs>("pairs", { run });
  const [most, setMost] = useState(SHOWN);
  const [only, setOnly] = useState<"all" | "learned" | "forgotten">("all");
  if (!data?.pairs.length) return null;
  const kind = (pair: { before: Row; after: Row }) => Math.sign((pair.after.success ?? pair.after.reward) - (pair.before.success ?? pair.before.reward));
  const shown = data.pairs.filter((pair) => only === "all" || kind(pair) === (only === "learned" ? 1 : -1));
  const counted = (way: number) => data.pairs.filter((pair) => kind(pair) === way).length;
  return (
    <Section title="Before and after, on the same levels" beside={`after ${num(data.first)} and after ${num(data.last)} steps · ${num(data.total)} levels`}>
      <Choice label="levels" value={only} options={[["all", "All"], ["learned", `Learned ${counted(1)}`], ["forgotten", `Forgotten ${counted(-1)}`]]} onChange={setOnly} />
      <div class="pairs">
        {shown.slice(0, most).map((pair) => (
          <div key={pair.before.rollout_id} class="pair">
            <h3>{pair.before.tag}, level {pair.before.seed}</h3>
            {[pair.before, pair.after].map((row, place) => (
              <div key={row.rollout_id}>
                <div class="beside">
                  {place ? "after" : "before"}: <Solved share={row.success} /> · reward {num(row.reward)} · <a href={link(["run", run, "trajectory", row.rollout_id])}>{count(row.turns, "turn")}</a>
                </div>
                <Film run={run} rollout={row.rollout_id} />
              </div>
            ))}
          </div>
        ))}
      </div>
      {shown.length > most && <button type="button" class="more" onClick={() => setMost(most + SHOWN)}>more levels</button>}
    </Section>
  );
}

const FRAMES = 10;

function Film({ run, rollout }: { run: string; rollout: string }) {
  const [episode, setEpisode] = useState<Episode | null>(null);
  useEffect(() => {
    ask<Episode>("episode", { run, rollout, count: FRAMES }).then((found) => setEpisode(found.data), () => undefined);
  }, [run, rollout]);
  if (!episode) return <div class="film" />;
  const frames = [episode.observation, ...episode.turns.map((turn) => turn.outcome?.observation ?? "")].map(boardIn);
  if (!frames.some(Boolean)) return <p class="film-text">{episode.turns.map((turn) => turn.outcome?.action ?? turn.text.slice(0, 40)).join(" → ")}</p>;
  return (
    <div class="film">
      {frames.map((frame, place) => frame && (
        <figure key={place}>
          <Board lines={frame.lines} small />
          <figcaption>{place ? (episode.turns[place - 1]!.outcome?.action ?? "–") : "start"}</figcaption>
        </figure>
      ))}
      {episode.turn_count > FRAMES && <span class="faded">…</span>}
    </div>
  );
}
