// The report of an evaluation: its figures with intervals, by environment and by field, its tasks, failures and cost.
import { type Dict, type Maybe, useAsk } from "../api";
import { compact, money, num, percent } from "../format";
import { Loading, Section, Tile } from "../parts";
import { Interval } from "./training";

interface Estimate {
  value: number;
  low: Maybe<number>;
  high: Maybe<number>;
  tasks: number;
}

export interface Result {
  tasks: number;
  episodes: number;
  failed: number;
  score: Maybe<Estimate>;
  success: Maybe<Estimate>;
  reward: Maybe<Estimate>;
  "pass@k": Maybe<Dict<Maybe<Estimate>>>;
  "majority@k": Maybe<Dict<Maybe<Estimate>>>;
  turns: Maybe<number>;
  tokens: Maybe<number>;
}

export interface Report {
  problem?: string;
  state?: string;
  metric?: string;
  model?: unknown;
  plan?: { tasks: number; samples: number; k: number[]; confidence: number };
  tasks?: { played: number; with_result: number; without_result: number };
  episodes?: { finished: number; failed: number; not_played: number };
  overall?: Result;
  tags?: Dict<Result>;
  by?: Dict<Dict<Result>>;
  failures?: unknown;
  cost?: { total?: Dict<Maybe<number>> };
  results?: Dict<any>[];
  result_count?: number;
}

export function EvaluationView({ run }: { run: string }) {
  const { data, error } = useAsk<Report>("evaluation", { run }, 4000);
  if (!data) return <Loading error={error} />;
  if (data.problem) return <p class="failure" role="alert">{data.problem}</p>;
  const score = data.overall?.score;
  const total = data.cost?.total;
  return (
    <>
      <div class="tiles">
        <Tile name={data.metric ?? "score"} value={score ? (data.metric === "success" ? percent(score.value, 1) : num(score.value)) : "–"} beside={score ? `over ${num(score.tasks)} tasks` : ""} />
        <Tile name="state" value={data.state ?? "–"} beside={data.plan ? `${num(data.plan.tasks)} tasks, ${num(data.plan.samples)} samples each` : ""} />
        <Tile name="episodes" value={num(data.episodes?.finished)} beside={`${num(data.episodes?.failed)} failed, ${num(data.episodes?.not_played)} not played`} />
        {typeof data.model === "string" && <Tile name="model" value={data.model} />}
        {total && <Tile name="cost" value={money(total.usd)} beside={Object.entries(total).filter(([name, value]) => name !== "usd" && value).map(([name, value]) => `${compact(value)} ${name}`).join(", ")} />}
      </div>
      {data.overall && (
        <Section title="Results" beside={`${percent(data.plan?.confidence ?? 0.95)} intervals over tasks`}>
          <ResultTable rows={{ overall: data.overall, ...data.tags }} metric={data.metric} />
        </Section>
      )}
      {Object.entries(data.by ?? {}).map(([name, rows]) => (
        <Section key={name} title={`By ${name}`}><ResultTable rows={rows} metric={data.metric} /></Section>
      ))}
      {data.results && data.results.length > 0 && (
        <Section title="Tasks" beside={`${num(data.results.length)} of ${num(data.result_count)}`}>
          <div class="scroll short">
            <table>
              <thead><tr><th>environment</th><th>task</th><th class="right">score</th><th class="right">reward</th><th class="right">failed</th></tr></thead>
              <tbody>
                {data.results.map((row, place) => (
                  <tr key={place}><td>{String(row.tag ?? "–")}</td><td>{String(row.task ?? "–")}</td><td class="right">{num(row.score)}</td><td class="right">{num(row.reward)}</td><td class="right">{num(row.failed)}</td></tr>
                ))}
              </tbody>
            </table>
          </div>
        </Section>
      )}
    </>
  );
}

export function ResultTable({ rows, metric, tones }: { rows: Dict<Result>; metric?: string; tones?: boolean }) {
  const ks = [...new Set(Object.values(rows).flatMap((row) => Object.keys(row?.["pass@k"] ?? {})))];
  const votes = [...new Set(Object.values(rows).flatMap((row) => Object.keys(row?.["majority@k"] ?? {})))];
  return (
    <div class="scroll">
      <table>
        <thead>
          <tr>
            <th></th>
            <th>{metric ?? "score"}</th>
            {ks.map((k) => <th key={k} class="right">pass@{k}</th>)}
            {votes.map((k) => <th key={k} class="right">majority@{k}</th>)}
            <th class="right">reward</th><th class="right">tasks</th><th class="right">episodes</th><th class="right">failed</th><th class="right">turns</th><th class="right">tokens</th>
          </tr>
        </thead>
        <tbody>
          {Object.entries(rows).map(([name, row], place) => (
            <tr key={name}>
              <td>{tones && <span class={`dot tone${place}`} />} {name}</td>
              <td><Score estimate={row.score} share={metric === "success"} /></td>
              {ks.map((k) => <td key={k} class="right">{percent(row["pass@k"]?.[k]?.value, 1)}</td>)}
              {votes.map((k) => <td key={k} class="right">{percent(row["majority@k"]?.[k]?.value, 1)}</td>)}
              <td class="right">{num(row.reward?.value)}</td>
              <td class="right">{num(row.tasks)}</td>
              <td class="right">{num(row.episodes)}</td>
              <td class="right">{num(row.failed)}</td>
              <td class="right">{num(row.turns, 1)}</td>
              <td class="right">{num(row.tokens, 0)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Score({ estimate, share }: { estimate: Maybe<Estimate>; share: boolean }) {
  if (!estimate) return <span class="faded">–</span>;
  const known = estimate.low !== null && estimate.low !== undefined && estimate.high !== null && estimate.high !== undefined;
  if (share) return <Interval share={estimate.value} interval={known ? [estimate.low!, estimate.high!] : null} />;
  return <span>{num(estimate.value)}{known ? <span class="faded"> {num(estimate.low)} – {num(estimate.high)}</span> : null}</span>;
}
