// One trajectory: turn by turn, as exact tokens, beside its group, or as a forest.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, type Episode, type Said, type ToolCall, type Turn, useAsk } from "../api";
import { count, duration, num, shortId, signed } from "../format";
import { Choice, CopyLink, Loading, Notes, Solved, tint, useKeys } from "../parts";
import { go, link, type Route } from "../route";
import { Code, Rich } from "../text";
import { ForestView } from "./forest";
import { GroupPart } from "./group";
import { Tokens, type Tone, TONES } from "./tokens";

const PAGE = 40;
type Show = "turns" | "tokens" | "group" | "forest";

export function TrajectoryView({ run, name, rollout, route }: { run: string; name: string; rollout: string; route: Route }) {
  const turn = route.query.has("turn") ? Number(route.query.get("turn")) : null;
  const show = (route.query.get("show") ?? "turns") as Show;
  const tone = (route.query.get("colour") ?? "advantage") as Tone;
  const first = turn === null ? 0 : Math.max(0, turn - 5);
  const [start, setStart] = useState(first);
  useEffect(() => setStart(turn === null ? 0 : (at) => (turn >= at && turn < at + PAGE ? at : Math.max(0, turn - 5))), [rollout, turn]);
  const { data, error, indexing } = useAsk<Episode>("episode", { run, rollout, from: start, count: PAGE });
  const at = (query: Record<string, string | number | null | undefined>) => link(["run", run, "trajectory", rollout], { turn, show: show === "turns" ? "" : show, colour: tone === "advantage" ? "" : tone, ...query });
  const change = (query: Record<string, string | number | null | undefined>) => go(at(query), true);
  const move = (by: number) => {
    if (!data) return;
    const next = Math.min(data.turn_count - 1, Math.max(0, (turn ?? (by > 0 ? -1 : 0)) + by));
    change({ turn: next });
  };
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    n: () => data?.next && go(link(["run", run, "trajectory", data.next], { show: show === "turns" ? "" : show })),
    p: () => data?.previous && go(link(["run", run, "trajectory", data.previous], { show: show === "turns" ? "" : show })),
    t: () => change({ show: show === "tokens" ? "" : "tokens" }),
    g: () => change({ show: show === "group" ? "" : "group" }),
    f: () => change({ show: show === "forest" ? "" : "forest" }),
  });
  if (!data) return <Loading error={error} indexing={indexing} />;
  const shapes: [Show, string][] = [["turns", "Turns"], ["tokens", "Tokens"]];
  if (data.members.length > 1) shapes.push(["group", `Group of ${data.members.length}`]);
  shapes.push(["forest", "Forest"]);
  return (
    <>
      <Head run={run} name={name} data={data} show={show} />
      <div class="bar">
        <Choice label="show" value={show} options={shapes} onChange={(value) => change({ show: value === "turns" ? "" : value })} />
        {show === "tokens" && <Choice label="colour" value={tone} options={TONES} onChange={(value) => change({ colour: value === "advantage" ? "" : value })} />}
      </div>
      <Notes lines={data.notes} />
      {show === "group" ? (
        <GroupPart run={run} name={name} group={data.group_id} chosen={rollout} />
      ) : show === "forest" ? (
        <ForestView run={run} rollout={rollout} turn={turn} />
      ) : (
        <Turns run={run} data={data} chosen={turn} tokens={show === "tokens" ? tone : null} start={start} setStart={setStart} at={at} />
      )}
    </>
  );
}

function Head({ run, name, data, show }: { run: string; name: string; data: Episode; show: Show }) {
  const kept = show === "turns" ? "" : show;
  const versions = data.step?.version;
  return (
    <header class="episode-head">
      <div class="episode-title">
        <h1>{shortId(data.rollout_id, name)}</h1>
        <div class="steps">
          <a class="button" aria-disabled={!data.previous} href={data.previous ? link(["run", run, "trajectory", data.previous], { show: kept }) : undefined} title="previous episode (p)">← previous</a>
          <a class="button" aria-disabled={!data.next} href={data.next ? link(["run", run, "trajectory", data.next], { show: kept }) : undefined} title="next episode (n)">next →</a>
          <CopyLink to={link(["run", run, "trajectory", data.rollout_id], { show: kept })} label="copy the link of this episode" />
        </div>
      </div>
      <dl class="facts">
        <Fact name="reward"><b>{num(data.reward)}</b>{data.penalty ? ` (penalty ${num(data.penalty)})` : ""}</Fact>
        <Fact name="result"><Solved share={data.success} /></Fact>
        <Fact name="environment">{data.tag}, level {data.seed}</Fact>
        <Fact name="ended by">{data.stop ?? "–"}</Fact>
        <Fact name="turns">{num(data.turn_count)}{data.leaves > 1 ? `, ${num(data.leaves)} leaves` : ""}</Fact>
        <Fact name="tokens">{num(data.tokens)}</Fact>
        <Fact name="time">{duration(data.duration)}</Fact>
        <Fact name="group">
          <a href={link(["run", run, "trajectories"], { group: data.group_id })}>{shortId(data.group_id, name)}</a>
        </Fact>
        {data.step && <Fact name={data.step.mode === "val" ? "validation" : "batch"}>{data.step.step}{versions !== null && versions !== undefined ? `, version ${versions}` : ""}</Fact>}
        {data.agents.length > 1 && <Fact name="agents">{data.agents.join(", ")}</Fact>}
        {data.sampling && <Fact name="sampled at">{data.sampling}</Fact>}
        {data.worker && <Fact name="worker">{data.worker}</Fact>}
      </dl>
      {Object.keys(data.components).length > 0 && (
        <div class="components" aria-label="rewards by component">
          {Object.entries(data.components).map(([each, value]) => (
            <span key={each} class="component"><span>{each}</span> <b>{num(value)}</b></span>
          ))}
        </div>
      )}
      {data.error && <p class="failure">{data.error.boundary} failure at turn {data.error.turn + 1}: {data.error.kind}: {data.error.message}</p>}
      {data.not_trainable && <p class="note warn">not trainable: {data.not_trainable}</p>}
      {data.caught.length > 0 && <p class="note warn">caught by {data.caught.join(", ")}{data.replaced ? "; another rollout has replaced it" : ""}{data.dropped ? `; the whole group is left out because of ${data.dropped}` : ""}{data.filtered ? `; out of the loss${data.in_baseline ? "" : " and the baseline"}` : ""}</p>}
      {Object.keys(data.metrics).length > 0 && (
        <details>
          <summary>counted by the episode</summary>
          <dl class="facts">{Object.entries(data.metrics).map(([each, value]) => <Fact key={each} name={each}>{num(value)}</Fact>)}</dl>
        </details>
      )}
    </header>
  );
}

function Fact({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

interface TurnsProps {
  run: string;
  data: Episode;
  chosen: number | null;
  tokens: Tone | null;
  start: number;
  setStart: (start: number) => void;
  at: (query: Record<string, string | number>) => string;
}

function Turns({ run, data, chosen, tokens, start, setStart, at }: TurnsProps) {
  const [more, setMore] = useState<Turn[]>([]);
  const end = data.first_turn + data.turns.length + more.length;
  const edge = useRef<HTMLButtonElement>(null);
  const loading = useRef(false);
  useEffect(() => setMore([]), [data.rollout_id, start]);
  const load = async () => {
    if (loading.current || end >= data.turn_count) return;
    loading.current = true;
    const found = await ask<Episode>("episode", { run, rollout: data.rollout_id, from: end, count: PAGE });
    loading.current = false;
    if (found.data) setMore((before) => [...before, ...found.data!.turns]);
  };
  useEffect(() => {
    if (!edge.current) return;
    const seen = new IntersectionObserver((entries) => entries.some((each) => each.isIntersecting) && load(), { rootMargin: "400px" });
    seen.observe(edge.current);
    return () => seen.disconnect();
  });
  const strongest = Math.max(1e-9, ...data.turns.map((turn) => Math.abs(turn.advantage ?? 0)));
  return (
    <div class="turns">
      {data.first_turn > 0 ? (
        <button type="button" class="more" onClick={() => setStart(Math.max(0, data.first_turn - PAGE))}>show {num(Math.min(PAGE, data.first_turn))} earlier turns</button>
      ) : (
        <Opening data={data} tokens={tokens !== null} />
      )}
      {[...data.turns, ...more].map((turn) => (
        <TurnPart key={turn.id} run={run} data={data} turn={turn} chosen={turn.id === chosen} tokens={tokens} strongest={strongest} at={at} />
      ))}
      {end < data.turn_count && (
        <button type="button" class="more" ref={edge} onClick={load}>{num(data.turn_count - end)} further turns</button>
      )}
      {end >= data.turn_count && data.returned !== null && data.returned !== undefined && (
        <Bubble who="returned" kind="env"><Code text={data.returned} language="json" /></Bubble>
      )}
    </div>
  );
}

function Opening({ data, tokens }: { data: Episode; tokens: boolean }) {
  return (
    <>
      {data.opening.length > 0 && (
        <details class="opening" open={data.turn_count < 2 && !tokens}>
          <summary>opening messages ({data.opening.length})</summary>
          {data.opening.map((message, place) => <MessagePart key={place} message={message} />)}
        </details>
      )}
      {data.conversation.length > 0 && (
        <details class="opening">
          <summary>the agent's own conversation ({data.conversation.length} messages)</summary>
          {data.conversation.map((message, place) => <MessagePart key={place} message={message} />)}
        </details>
      )}
      {data.observation && <Bubble who="start" kind="env"><Rich text={data.observation} /></Bubble>}
    </>
  );
}

function MessagePart({ message }: { message: Said }) {
  return (
    <Bubble who={message.name ? `${message.role} · ${message.name}` : message.role} kind={message.role}>
      {message.reasoning && <details><summary>reasoning</summary><Rich text={message.reasoning} /></details>}
      {(message.content || !message.tool_calls.length) && <Rich text={message.content} />}
      <Calls calls={message.tool_calls} />
    </Bubble>
  );
}

function Bubble({ who, kind, children }: { who: string; kind: string; children: preact.ComponentChildren }) {
  return (
    <div class={`bubble bubble-${kind === "assistant" ? "agent" : kind === "system" ? "system" : kind === "tool" ? "tool" : "env"}`}>
      <div class="who">{who}</div>
      {children}
    </div>
  );
}

function Calls({ calls }: { calls: ToolCall[] }) {
  return (
    <>
      {calls.map((call) => (
        <div key={call.id} class="call">
          <span class="call-name">{call.name}</span>
          <Code text={pretty(call.arguments)} language="json" />
        </div>
      ))}
    </>
  );
}

const WRITTEN_CALL = /<tool_call>\s*(\{[\s\S]*?\})\s*<\/tool_call>/;

/** A text in which the model has written its tool calls. */
function WithCalls({ text }: { text: string }) {
  const parts: preact.ComponentChildren[] = [];
  let rest = text;
  for (let match = WRITTEN_CALL.exec(rest); match && parts.length < 100; match = WRITTEN_CALL.exec(rest)) {
    const before = rest.slice(0, match.index);
    if (before.trim()) parts.push(<Rich text={before} />);
    parts.push(<WrittenCall text={match[1]!} />);
    rest = rest.slice(match.index + match[0].length);
  }
  if (rest.trim()) parts.push(<Rich text={rest} />);
  return <>{parts}</>;
}

function WrittenCall({ text }: { text: string }) {
  let call: { name?: unknown; arguments?: unknown };
  try {
    call = JSON.parse(text);
  } catch {
    return <Code text={text} language="json" />;
  }
  const given = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments ?? {}, null, 2);
  return <Calls calls={[{ id: "", name: String(call.name ?? "tool"), arguments: given }]} />;
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function TurnPart({ run, data, turn, chosen, tokens, strongest, at }: { run: string; data: Episode; turn: Turn; chosen: boolean; tokens: Tone | null; strongest: number; at: (query: Record<string, string | number>) => string }) {
  const place = useRef<HTMLElement>(null);
  const [plain, setPlain] = useState(false);
  useEffect(() => {
    if (chosen) place.current?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  const { outcome } = turn;
  const branches = turn.after !== null && turn.after !== undefined && turn.after !== turn.id - 1;
  const versions = turn.versions.map(([version]) => version);
  return (
    <article class={chosen ? "turn chosen" : "turn"} ref={place} id={`turn-${turn.id}`} aria-label={`turn ${turn.id + 1}`}>
      <header>
        <a class="turn-number" href={at({ turn: turn.id })}>turn {turn.id + 1}</a>
        {data.agents.length > 1 && <span class="tag">{turn.agent}</span>}
        {branches && <span class="tag">after turn {turn.after! + 1}</span>}
        {turn.after === null && turn.id > 0 && <span class="tag">another root</span>}
        {turn.extends === null && turn.id > 0 && <span class="tag" title="its prompt starts a new token sequence">new sequence</span>}
        {turn.count > 1 && <span class="tag">{turn.count} the same</span>}
        <span class="beside">
          {count(turn.tokens, "token")} · {turn.finish}
          {versions.length ? ` · version ${[...new Set(versions)].join("–")}` : ""}
        </span>
        <span class="turn-figures">
          {turn.untrained && <span class="tag warn">not trained: {turn.untrained}</span>}
          {turn.advantage !== null && turn.advantage !== undefined && (
            <span class="advantage" style={{ background: tint(turn.advantage / strongest) }} title={`advantage by ${data.advantage_name ?? ""}`}>A {signed(turn.advantage)}</span>
          )}
          {outcome && <span class="turn-reward" title="reward of this turn">r {signed(outcome.reward)}{outcome.penalty ? ` ${signed(outcome.penalty)}` : ""}</span>}
          <button type="button" class="copy" aria-pressed={plain} title="show the text as it is written" onClick={() => setPlain(!plain)}>raw</button>
          <CopyLink to={at({ turn: turn.id })} label={`copy the link of turn ${turn.id + 1}`} />
        </span>
      </header>
      {tokens ? (
        <Tokens run={run} rollout={data.rollout_id} turn={turn.id} tone={tokens} strongest={strongest} />
      ) : (
        <div class="bubble bubble-agent">
          {data.agents.length > 1 && <div class="who">{turn.agent}</div>}
          {plain || !WRITTEN_CALL.test(turn.text) ? (turn.text || !turn.tool_calls.length) && <Rich text={turn.text} plain={plain} /> : <WithCalls text={turn.text} />}
          <Calls calls={turn.tool_calls} />
        </div>
      )}
      {outcome && (
        <div class="bubble bubble-env">
          <div class="who">
            environment{outcome.action !== null && outcome.action !== undefined ? ` · ${outcome.action}` : outcome.valid ? "" : " · no valid action"}
            {outcome.terminated ? " · the end" : outcome.truncated ? " · cut off" : ""}
            {outcome.success === true ? " · solved" : ""}
          </div>
          <Rich text={outcome.observation} plain={plain} />
        </div>
      )}
    </article>
  );
}

