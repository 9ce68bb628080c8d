// The finished episodes of a run: search over all text, filters, and a page of rows.
import { type Listing, type Row, useAsk } from "../api";
import { duration, num, percent, shortId } from "../format";
import { Loading, Notes, Solved, Typed } from "../parts";
import { go, link, type Route } from "../route";

const PAGE = 50;
const FILTERS = ["text", "tag", "stop", "caught", "agent", "mode", "success", "least", "most", "group", "sort"] as const;
type Filter = (typeof FILTERS)[number];
const SORTS: [string, string][] = [
  ["", "newest first"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-turns", "most turns"],
  ["-tokens", "most tokens"],
  ["-wall", "longest time"],
  ["started", "oldest first"],
];

export function EpisodesView({ run, name, route }: { run: string; name: string; route: Route }) {
  const given = Object.fromEntries(FILTERS.map((key) => [key, route.query.get(key) ?? ""])) as Record<Filter, string>;
  const offset = Number(route.query.get("offset") ?? 0);
  const { data, error, indexing } = useAsk<Listing>("episodes", { run, ...given, offset, limit: PAGE }, 1500);
  const change = (key: Filter, value: string) => go(link(["run", run, "trajectories"], { ...given, [key]: value }), true);
  const turn = (to: number) => go(link(["run", run, "trajectories"], { ...given, offset: to || "" }));
  const narrowed = FILTERS.some((key) => key !== "sort" && given[key]);
  return (
    <>
      <div class="filters" role="search">
        <Typed id="search" wide label="Search all text" value={given.text} onChange={(value) => change("text", value)} />
        <Pick label="environment" value={given.tag} counts={data?.tags} onChange={(value) => change("tag", value)} />
        <Pick label="stop reason" value={given.stop} counts={data?.stops} onChange={(value) => change("stop", value)} />
        <Pick label="filter caught" value={given.caught} counts={data && Object.keys(data.caught).length ? { "*": Object.values(data.caught).reduce((a, b) => a + b, 0), ...data.caught } : data?.caught} onChange={(value) => change("caught", value)} />
        <Pick label="agent" value={given.agent} counts={data?.agents} onChange={(value) => change("agent", value)} />
        <Pick label="mode" value={given.mode} names={["train", "val"]} onChange={(value) => change("mode", value)} />
        <Pick label="solved" value={given.success} names={["yes", "no"]} onChange={(value) => change("success", value)} />
        <span class="range">
          <Typed label="reward from" value={given.least} onChange={(value) => change("least", numeric(value))} />
          <Typed label="to" value={given.most} onChange={(value) => change("most", numeric(value))} />
        </span>
        <select aria-label="sort" value={given.sort} disabled={!!given.text} onChange={(event) => change("sort", event.currentTarget.value)}>
          {SORTS.map(([value, shown]) => (
            <option key={value} value={value}>{shown}</option>
          ))}
        </select>
        {narrowed && <button type="button" onClick={() => go(link(["run", run, "trajectories"]), true)}>clear</button>}
      </div>
      {!data ? (
        <Loading error={error} indexing={indexing} />
      ) : (
        <>
          {error && <p class="failure" role="alert">{error}</p>}
          <p class="beside" aria-live="polite">
            {num(data.total)}
            {data.at_least ? "+" : ""} {narrowed ? `of ${num(data.episodes)} episodes match` : "episodes"}
            {given.group ? ` in group ${given.group}` : ""} · {num(data.turns)} turns
            {data.indexed < 1 ? ` · reading the log: ${percent(data.indexed)}` : ""}
          </p>
          <Notes lines={data.notes} />
          <div class="scroll">
            <table class="episode-list" hidden={!data.rows.length}>
              <thead>
                <tr>
                  <th>episode</th>
                  <th>environment</th>
                  <th class="right">reward</th>
                  <th>result</th>
                  <th>ended by</th>
                  <th class="right">turns</th>
                  <th class="right">tokens</th>
                  <th class="right">time</th>
                  <th>caught by</th>
                </tr>
              </thead>
              <tbody>
                {data.rows.map((row) => (
                  <Line key={row.rollout_id} run={run} name={name} row={row} />
                ))}
              </tbody>
            </table>
          </div>
          {!data.rows.length && <p class="empty">{narrowed ? "No episode matches." : "No episode has finished yet."}</p>}
          <Pages offset={offset} total={data.total} turn={turn} />
        </>
      )}
    </>
  );
}

function oneLine(text: string): string {
  return text.replace(/\s*\n\s*/g, " ⏎ ");
}

function numeric(value: string): string {
  return value.trim() !== "" && Number.isFinite(Number(value)) ? value.trim() : "";
}

function Pick({ label, value, counts, names, onChange }: { label: string; value: string; counts?: Record<string, number>; names?: string[]; onChange: (value: string) => void }) {
  const options = names ?? Object.keys(counts ?? {});
  if (value && !options.includes(value)) options.push(value);
  if (!options.length) return null;
  return (
    <select aria-label={label} value={value} class={value ? "set" : ""} onChange={(event) => onChange(event.currentTarget.value)}>
      <option value="">{label}: any</option>
      {options.map((each) => (
        <option key={each} value={each}>
          {each === "*" ? "any filter" : each}
          {counts?.[each] !== undefined ? ` (${num(counts[each])})` : ""}
        </option>
      ))}
    </select>
  );
}

function Line({ run, name, row }: { run: string; name: string; row: Row }) {
  const to = link(["run", run, "trajectory", row.rollout_id]);
  return (
    <>
      <tr>
        <td class="title">
          <a href={to}>{shortId(row.rollout_id, name)}</a>
          {row.leaves > 1 && <span class="tag">{num(row.leaves)} leaves</span>}
          {row.agents.length > 1 && <span class="tag">{row.agents.length} agents</span>}
        </td>
        <td data-name="environment">{row.tag} <span class="faded">level {row.seed}</span></td>
        <td data-name="reward" class="right">{num(row.reward)}{row.penalty ? <span class="faded"> {num(row.penalty)}</span> : null}</td>
        <td data-name="result"><Solved share={row.success} /></td>
        <td data-name="ended by">{row.stop ?? "–"}</td>
        <td data-name="turns" class="right">{num(row.turns)}</td>
        <td data-name="tokens" class="right">{num(row.tokens)}</td>
        <td data-name="time" class="right">{duration(row.wall)}</td>
        <td data-name="caught by">{row.caught.map((each) => <span key={each} class="tag warn">{each}</span>)}</td>
      </tr>
      {row.hits?.map((hit) => (
        <tr key={hit.turn} class="hit">
          <td colSpan={9}>
            <a href={link(["run", run, "trajectory", row.rollout_id], hit.turn >= 0 ? { turn: hit.turn } : {})}>{hit.turn >= 0 ? `turn ${hit.turn + 1}` : "start"}</a> {oneLine(hit.before)}
            <mark>{hit.match}</mark>
            {oneLine(hit.after)}
          </td>
        </tr>
      ))}
    </>
  );
}

function Pages({ offset, total, turn }: { offset: number; total: number; turn: (to: number) => void }) {
  if (total <= PAGE) return null;
  return (
    <nav class="pages" aria-label="pages">
      <button type="button" disabled={offset <= 0} onClick={() => turn(Math.max(0, offset - PAGE))}>← earlier page</button>
      <span>{num(offset + 1)}–{num(Math.min(total, offset + PAGE))} of {num(total)}</span>
      <button type="button" disabled={offset + PAGE >= total} onClick={() => turn(offset + PAGE)}>next page →</button>
    </nav>
  );
}
