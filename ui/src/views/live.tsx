// What a run is doing now: every episode with what it waits for, workers and leases, failures, the ledger, the verdict.
import { useEffect, useRef, useState } from "preact/hooks";
import { type Card, type Cause, type Live, type Maybe, type StoreLook, useAsk, type Verdict, type Waiting } from "../api";
import { Histogram, Meter, Stacked } from "../charts";
import { ago, compact, duration, num, percent, shortId } from "../format";
import { Loading, Problems, Section, State, Tile } from "../parts";
import { link } from "../route";
import { FlowChart } from "./flow";

export const PHASES = ["engine", "transport", "tool", "environment", "lock", "store", "agent"];
const SHOWN = 60;

export function LiveView({ run }: { run: string }) {
  const { data, error, indexing } = useAsk<Live>("live", { run }, 600);
  const rates = useRates(data);
  if (!data) return <Loading error={error} indexing={indexing} />;
  const snapshot = data.snapshot;
  const episodes: Waiting[] = snapshot?.episodes ?? data.store?.episodes ?? [];
  const waiting: Record<string, number> = snapshot?.waiting ?? together(data.store);
  return (
    <>
      {error && <p class="failure" role="alert">{error}</p>}
      <Problems lines={data.problem_lines} />
      <Now live={data} card={data.card} rates={rates} />
      {(snapshot || data.store) && (
        <Section title="Episodes in flight" beside={`${num(episodes.length)} shown, the longest waits first`}>
          <Stacked label="episodes by what they wait for" parts={PHASES.filter((phase) => waiting[phase]).map((phase) => ({ name: phase, count: waiting[phase]!, tone: phase }))} />
          <EpisodeTable run={run} name={data.card.name} episodes={episodes} />
        </Section>
      )}
      <div class="columns">
        <Section title="From opened to trained">
          <FlowChart flow={data.flow} />
        </Section>
        <Section title="Verdict" beside={data.verdict ? `of the last ${num(data.verdict.rollouts)} episodes` : ""}>
          <VerdictPart verdict={data.verdict} />
        </Section>
      </div>
      {data.store && <StorePart run={run} name={data.card.name} look={data.store} />}
      <div class="columns">
        <Section title="Failures by cause">
          <Causes run={run} causes={data.failures} attempts={data.activity?.failed_attempt_causes} />
        </Section>
        <Section title="Staleness">
          {Object.keys(data.staleness).length ? (
            <Histogram title="trained tokens by age in policy versions" unit="tokens" counts={Object.entries(data.staleness)} />
          ) : (
            <p class="faded">no batch was delivered yet</p>
          )}
        </Section>
      </div>
    </>
  );
}

function together(look: Maybe<StoreLook>): Record<string, number> {
  const sum: Record<string, number> = {};
  for (const worker of look?.workers ?? []) if (worker.state === "busy") for (const [phase, count] of Object.entries(worker.waiting)) sum[phase] = (sum[phase] ?? 0) + count;
  return sum;
}

/** Turns and tokens per second, between snapshots that are a second or more apart. */
function useRates(live: Live | null): { turns: number; tokens: number } | null {
  const before = useRef<{ time: number; turns: number; tokens: number } | null>(null);
  const [rates, setRates] = useState<{ turns: number; tokens: number } | null>(null);
  useEffect(() => {
    const snapshot = live?.snapshot;
    if (!snapshot) {
      before.current = null;
      setRates(null);
      return;
    }
    const now = { time: snapshot.time, turns: snapshot.activity?.turns ?? 0, tokens: snapshot.activity?.tokens ?? 0 };
    const last = before.current;
    if (last && now.time - last.time >= 0.9) setRates({ turns: (now.turns - last.turns) / (now.time - last.time), tokens: (now.tokens - last.tokens) / (now.time - last.time) });
    if (!last || now.time - last.time >= 0.9) before.current = now;
  }, [live?.snapshot?.number]);
  return rates;
}

function Now({ live, card, rates }: { live: Live; card: Card; rates: { turns: number; tokens: number } | null }) {
  const { snapshot } = live;
  const { progress } = card;
  const slots = snapshot?.slots as Maybe<number>;
  const atEngine = (snapshot?.waiting?.engine as Maybe<number>) ?? 0;
  return (
    <div class="tiles" data-snapshot={snapshot?.time}>
      <Tile
        name="state"
        value={<State state={live.state} />}
        beside={snapshot ? `${snapshot.stage ?? ""} · seen ${ago(live.age)}` : live.last ? `process ${live.last.pid} on ${live.last.host}, last seen ${ago(live.now - live.last.time)}` : "no snapshot: the run is not playing"}
      />
      <Tile name={progress.unit ?? "steps"} value={progress.most_steps ? `${num(progress.steps)} / ${num(progress.most_steps)}` : num(progress.steps)} beside={progress.seconds_left !== null && progress.seconds_left !== undefined ? `about ${duration(progress.seconds_left)} left` : percent(progress.share)}>
        <Meter share={progress.share} label="progress" />
      </Tile>
      <Tile name="in flight" value={snapshot ? `${num(snapshot.inflight)} / ${num(snapshot.most_inflight)}` : num(card.inflight)} beside="episodes, of at most">
        {snapshot && <Meter share={snapshot.most_inflight ? snapshot.inflight / snapshot.most_inflight : null} label="episodes in flight" />}
      </Tile>
      <Tile name="engine slots" value={slots ? `${num(Math.min(atEngine, slots))} / ${num(slots)}` : num(atEngine)} beside={slots ? (atEngine > slots ? `${num(atEngine - slots)} calls wait in line` : "in use") : "calls at the engine"}>
        {slots ? <Meter share={Math.min(1, atEngine / slots)} label="engine slots in use" /> : null}
      </Tile>
      <Tile name="speed" value={rates ? compact(rates.tokens) : "–"} beside={rates ? `tokens/s · ${num(rates.turns, 0)} turns/s` : "sampled tokens/s"} />
      <Tile name="played" value={num(live.activity?.episodes)} beside={`${compact(live.activity?.turns)} turns · ${compact(live.activity?.tokens)} tokens`} />
      <Tile name="reward" value={num(card.reward)} beside={`${percent(card.success)} solved in the last batch`} />
      <Tile name="retries" value={num(Object.values((live.activity?.failed_attempts ?? {}) as Record<string, number>).reduce((sum, each) => sum + each, 0))} beside={`failed attempts · ${num(live.activity?.replayed_turns)} turns replayed`} />
    </div>
  );
}

function EpisodeTable({ run, name, episodes }: { run: string; name: string; episodes: Waiting[] }) {
  if (!episodes.length) return <p class="faded">no episode is in flight</p>;
  return (
    <div class="scroll tall">
      <table class="episodes">
        <thead>
          <tr>
            <th>episode</th>
            <th>waits for</th>
            <th class="right">since</th>
            <th class="right">turns</th>
            <th class="right">age</th>
            <th>worker</th>
          </tr>
        </thead>
        <tbody>
          {episodes.slice(0, SHOWN).map((each) => (
            <tr key={each.rollout_id}>
              <td>
                <a href={link(["run", run, "trajectory", each.rollout_id])}>{shortId(each.rollout_id, name)}</a> <span class="faded">{each.tag}</span>
              </td>
              <td>
                <span class={`phase phase-${each.phase}`}>{each.phase}</span> {[each.name, each.agent === "agent" ? "" : each.agent].filter(Boolean).join(" · ")}
              </td>
              <td class="right">{duration(each.seconds)}</td>
              <td class="right">{num(each.turns)}</td>
              <td class="right">{duration(each.age)}</td>
              <td>{each.worker}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {episodes.length > SHOWN && <p class="faded">and {num(episodes.length - SHOWN)} more</p>}
    </div>
  );
}

export function VerdictPart({ verdict }: { verdict: Maybe<Verdict> }) {
  if (!verdict) return <p class="faded">no finished episode has timings yet</p>;
  const share = (name: string, value: number) => (name.includes("slots busy") || name.includes("in line") ? percent(value) : num(value, 1));
  return (
    <div class="verdict">
      <p class="verdict-name">{verdict.verdict}</p>
      <Stacked label="what episodes waited for" parts={Object.entries(verdict.shares).map(([phase, part]) => ({ name: phase, count: Math.round(1000 * part) / 10, tone: phase }))} />
      {verdict.findings.map((finding) => (
        <div key={finding.cause}>
          <p>{finding.because}</p>
          <p class="advice">→ {finding.advice}</p>
        </div>
      ))}
      <dl class="figures">
        {Object.entries(verdict.figures).map(([name, value]) =>
          value === null || value === undefined ? null : (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{share(name, value)}</dd>
            </div>
          ),
        )}
      </dl>
    </div>
  );
}

export function Causes({ run, causes, attempts }: { run: string; causes: Cause[]; attempts?: Maybe<Cause[]> }) {
  const rows: [string, Cause][] = [...causes.map((each) => ["permanent", each] as [string, Cause]), ...(attempts ?? []).map((each) => ["attempt", each] as [string, Cause])];
  if (!rows.length) return <p class="faded">nothing has failed</p>;
  return (
    <table class="plain-table">
      <thead>
        <tr>
          <th class="right">count</th>
          <th>what</th>
          <th>why</th>
        </tr>
      </thead>
      <tbody>
        {rows.map(([kind, each]) => (
          <tr key={kind + each.cause}>
            <td class="right">{num(each.count)}</td>
            <td>{kind}</td>
            <td>
              {each.cause} {each.example && <a href={link(["run", run, "trajectory", each.example])} class="faded">for example {each.example}</a>}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function StorePart({ run, name, look }: { run: string; name: string; look: StoreLook }) {
  if (look.problem) return <p class="note">{look.problem}</p>;
  return (
    <div class="columns">
      <Section title="Workers" beside={Object.entries(look.counts).filter(([, count]) => count).map(([status, count]) => `${num(count)} ${status}`).join(" · ")}>
        <div class="scroll">
          <table>
            <thead>
              <tr>
                <th>worker</th>
                <th>state</th>
                <th class="right">seen</th>
                <th class="right">playing</th>
                <th>waiting for</th>
                <th class="right">tokens</th>
              </tr>
            </thead>
            <tbody>
              {look.workers.map((worker) => (
                <tr key={worker.id}>
                  <td>{worker.id}</td>
                  <td><State state={worker.state} /></td>
                  <td class="right">{ago(worker.age)}</td>
                  <td class="right">{num(worker.inflight)}</td>
                  <td>{worker.held_back ?? (Object.entries(worker.waiting).map(([phase, count]) => `${count} ${phase}`).join(" · ") || "–")}</td>
                  <td class="right">{compact(worker.tokens)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        {!look.workers.length && <p class="faded">no worker has joined</p>}
      </Section>
      <Section title="Leases and retries" beside={`${num(look.held_total)} held or to be retried`}>
        <div class="scroll short">
          <table>
            <thead>
              <tr>
                <th>rollout</th>
                <th>status</th>
                <th class="right">attempt</th>
                <th class="right">lease ends</th>
                <th>worker</th>
              </tr>
            </thead>
            <tbody>
              {look.held.map((each) => (
                <tr key={each.rollout_id}>
                  <td><a href={link(["run", run, "trajectory", each.rollout_id])}>{shortId(each.rollout_id, name)}</a></td>
                  <td>{each.status}</td>
                  <td class={`right${(each.attempt ?? 1) > 1 ? " warn" : ""}`} title={each.reason ?? ""}>{each.attempt ?? "–"} / {each.most_attempts}</td>
                  <td class="right">{each.lease_expires ? `in ${duration(Math.max(0, each.lease_expires - look.now))}` : "–"}</td>
                  <td>{each.worker ?? "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        {!look.held.length && <p class="faded">no rollout is held</p>}
      </Section>
    </div>
  );
}
