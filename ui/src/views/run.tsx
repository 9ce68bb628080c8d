// One run: its tabs, its overview and its settings.
import { type Dict, type Maybe, type Overview, useAsk } from "../api";
import { LineChart, Meter } from "../charts";
import { ago, compact, duration, money, num, percent } from "../format";
import { Loading, Problems, Section, State, Tile, useKeys } from "../parts";
import { go, link, type Route } from "../route";
import { EpisodesView } from "./episodes";
import { EvaluationView } from "./evaluation";
import { FlowChart } from "./flow";
import { Causes, LiveView } from "./live";
import { SwarmView } from "./swarm";
import { TrainingView } from "./training";
import { TrajectoryView } from "./trajectory";

const NAMES: Dict<string> = { overview: "Overview", live: "Live", trajectories: "Trajectories", training: "Curves", swarm: "Swarm", evaluation: "Evaluation", settings: "Settings" };

export function RunPage({ run, route }: { run: string; route: Route }) {
  const view = route.parts[2] ?? "overview";
  const { data, error } = useAsk<Overview>("run", { run }, 4000);
  const views = data?.views ?? [];
  useKeys(Object.fromEntries(views.map((each, place) => [String(place + 1), () => go(link(["run", run, each]))])));
  if (!data) return <main><Loading error={error} /></main>;
  const shown = view === "trajectory" ? "trajectories" : view;
  return (
    <main>
      <div class="run-head">
        <div class="run-title">
          {view === "trajectory" ? <span class="run-name">{data.id}</span> : <h1>{data.id}</h1>}
          <State state={data.state} />
          {data.simulated && <span class="tag warn">SIMULATED</span>}
          {data.problems > 0 && view !== "overview" && <a class="tag bad" href={link(["run", run])}>{data.problems === 1 ? "1 problem" : `${data.problems} problems`}</a>}
        </div>
        <nav class="tabs" aria-label="views of the run">
          {views.map((each, place) => (
            <a key={each} href={link(["run", run, each])} aria-current={shown === each ? "page" : undefined} title={`key ${place + 1}`}>
              {NAMES[each] ?? each}
            </a>
          ))}
        </nav>
      </div>
      <View run={run} view={view} data={data} route={route} />
    </main>
  );
}

function View({ run, view, data, route }: { run: string; view: string; data: Overview; route: Route }) {
  switch (view) {
    case "overview":
      return <OverviewPart run={run} data={data} />;
    case "live":
      return <LiveView run={run} />;
    case "trajectories":
      return <EpisodesView run={run} name={data.name} route={route} />;
    case "trajectory":
      return <TrajectoryView key={route.parts[3]} run={run} name={data.name} rollout={route.parts[3] ?? ""} route={route} />;
    case "training":
      return <TrainingView run={run} />;
    case "swarm":
      return <SwarmView run={run} />;
    case "evaluation":
      return <EvaluationView run={run} />;
    case "settings":
      return <Settings settings={data.settings} />;
    default:
      return <p class="empty">There is no view of this name.</p>;
  }
}

function OverviewPart({ run, data }: { run: string; data: Overview }) {
  const { progress } = data;
  const { train, validation } = data.curves;
  return (
    <>
      <Problems lines={data.problem_lines} />
      {data.error && <p class="failure" role="alert">the run ended with an error: {data.error}</p>}
      <div class="tiles">
        <Tile name={progress.unit ?? "steps"} value={progress.most_steps ? `${num(progress.steps)} / ${num(progress.most_steps)}` : num(progress.steps)} beside={data.state === "running" && progress.seconds_left ? `about ${duration(progress.seconds_left)} left` : data.changed ? `changed ${ago(Date.now() / 1000 - data.changed)}` : ""}>
          <Meter share={progress.share} label="progress" />
        </Tile>
        <Tile name="reward" value={num(data.reward)} beside="of the last batch" />
        <Tile name="solved" value={percent(data.success)} beside="of the last batch" />
        <Tile name="sampled tokens" value={compact(data.tokens)} beside={data.prompt_tokens ? `${compact(data.prompt_tokens)} prompt tokens` : ""} />
        {data.cost !== null && data.cost !== undefined && <Tile name="cost" value={money(data.cost)} beside="at the given prices" />}
        {data.budget && Object.entries(data.budget).map(([unit, { spent, limit }]) => (
          <Tile key={unit} name={`budget, ${unit}`} value={unit === "usd" ? `${money(spent)} / ${money(limit)}` : `${compact(spent)} / ${compact(limit)}`} beside={spent < limit ? "" : "reached"}>
            <Meter share={limit > 0 ? Math.min(1, spent / limit) : 1} label={`budget, ${unit}`} />
          </Tile>
        ))}
        <Tile name="time" value={duration(data.seconds)} beside={data.model ?? ""} />
      </div>
      <div class="charts">
        <LineChart title="Reward" xName="step" series={[{ name: "training batches", x: train.step ?? [], y: train.reward ?? [], tone: 0 }, { name: "validation", x: validation.map((each) => each.step), y: validation.map((each) => each.reward), tone: 1, dots: true }]} />
        <LineChart title="Solved" share xName="step" series={[{ name: "training batches", x: train.step ?? [], y: train.success ?? [], tone: 0 }, { name: "validation", x: validation.map((each) => each.step), y: validation.map((each) => each.success), tone: 1, dots: true }]} />
      </div>
      {data.results && data.results.length > 0 && <Results rows={data.results} />}
      <div class="columns">
        <Section title="From opened to trained">
          <FlowChart flow={data.flow} />
        </Section>
        <Section title="Failures by cause">
          <Causes run={run} causes={data.failures} attempts={data.activity?.failed_attempt_causes} />
        </Section>
      </div>
      <p class="beside path">{data.path}</p>
    </>
  );
}

function Results({ rows }: { rows: Dict<any>[] }) {
  return (
    <Section title="Results">
      <div class="scroll">
        <table>
          <thead>
            <tr>
              {["mode", "environment"].map((name) => <th key={name}>{name}</th>)}
              {["played", "solved", "random play", "perfect play", "reward", "turns", "tokens"].map((name) => <th key={name} class="right">{name}</th>)}
              <th>ended by</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={`${row.mode} ${row.tag}`}>
                <td>{row.mode}</td>
                <td>{row.tag}</td>
                <td class="right">{num(row.episodes)}</td>
                <td class="right"><b>{percent(row.success)}</b></td>
                <td class="right">{percent(row.random_success)}</td>
                <td class="right">{percent(row.oracle_success)}</td>
                <td class="right">{num(row.reward)}</td>
                <td class="right">{num(row.turns, 1)}</td>
                <td class="right">{num(row.tokens, 0)}</td>
                <td class="faded">{Object.entries(row.stops ?? {}).map(([stop, count]) => `${num(count as number)} ${stop}`).join(", ")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

export function flat(settings: unknown, prefix = ""): [string, string][] {
  if (Array.isArray(settings) && settings.every((each) => typeof each !== "object" || each === null)) return [[prefix, `[${settings.map(String).join(", ")}]`]];
  if (settings !== null && typeof settings === "object") {
    const entries = Object.entries(settings as Dict);
    if (!entries.length) return [[prefix, Array.isArray(settings) ? "[]" : "{}"]];
    return entries.flatMap(([key, value]) => flat(value, prefix ? `${prefix}.${key}` : key));
  }
  return [[prefix, settings === null ? "null" : String(settings)]];
}

function Settings({ settings }: { settings: Maybe<Dict> }) {
  if (!settings) return <p class="empty">The settings cannot be read.</p>;
  return (
    <table class="settings">
      <tbody>
        {flat(settings).map(([key, value]) => (
          <tr key={key}>
            <th scope="row">{key}</th>
            <td>{value}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
