// All runs of the given folders and stores, and the choice of those to compare.
import { useState } from "preact/hooks";
import { type Card, useAsk } from "../api";
import { Meter, Sparkline } from "../charts";
import { ago, compact, duration, money, num, percent } from "../format";
import { Loading, State, Typed } from "../parts";
import { go, link } from "../route";

export function Runs() {
  const { data, error } = useAsk<{ runs: Card[]; notes: string[] }>("runs", {}, 1500);
  const [chosen, setChosen] = useState<string[]>([]);
  const [wanted, setWanted] = useState("");
  if (!data) return <Loading error={error} what="looking for runs" />;
  const shown = data.runs.filter((run) => `${run.id} ${run.name} ${run.kind} ${run.state} ${run.tags.join(" ")} ${run.model ?? ""}`.toLowerCase().includes(wanted.toLowerCase()));
  shown.sort((one, other) => (other.changed ?? 0) - (one.changed ?? 0));
  const toggle = (id: string) => setChosen(chosen.includes(id) ? chosen.filter((each) => each !== id) : [...chosen, id]);
  const costs = data.runs.some((run) => run.cost !== null && run.cost !== undefined);
  return (
    <main>
      <div class="head-row">
        <h1>Runs</h1>
        <div class="tools">
          <Typed id="search" label="Filter runs" value={wanted} onChange={setWanted} />
          <button type="button" class="primary" disabled={chosen.length < 2} onClick={() => go(link(["compare", ...chosen]))}>
            Compare{chosen.length ? ` ${chosen.length}` : ""}
          </button>
        </div>
      </div>
      {error && <p class="failure" role="alert">{error}</p>}
      {data.notes.map((note) => (
        <p class="note" key={note}>{note}</p>
      ))}
      {!shown.length && <p class="empty">{data.runs.length ? "No run matches." : "No runs yet. Start one with `rollwright run CONFIG` or `rollwright train CONFIG`; it appears here."}</p>}
      <div class="scroll">
        <table class="runs" hidden={!shown.length}>
          <thead>
            <tr>
              <th><span class="hidden">compare</span></th>
              <th>run</th>
              <th>state</th>
              <th>progress</th>
              <th class="right">reward</th>
              <th>over time</th>
              <th class="right">solved</th>
              <th class="right">tokens</th>
              {costs && <th class="right">cost</th>}
              <th class="right">time</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((run) => (
              <Line key={run.id} run={run} chosen={chosen.includes(run.id)} toggle={() => toggle(run.id)} costs={costs} />
            ))}
          </tbody>
        </table>
      </div>
    </main>
  );
}

function Line({ run, chosen, toggle, costs }: { run: Card; chosen: boolean; toggle: () => void; costs: boolean }) {
  const { progress } = run;
  const of = progress.most_steps ? `${num(progress.steps)} of ${num(progress.most_steps)}` : num(progress.steps);
  return (
    <tr>
      <td class="pick">
        <input type="checkbox" aria-label={`compare ${run.name}`} checked={chosen} onChange={toggle} />
      </td>
      <td class="title">
        <a href={link(["run", run.id])}>{run.id}</a>
        <div class="beside">
          {run.kind} · {run.tags.join(", ") || "–"}
          {run.model ? ` · ${run.model}` : ""}
          {run.simulated && <span class="tag warn">SIMULATED</span>}
          {run.problems > 0 && <span class="tag bad">{run.problems === 1 ? "1 problem" : `${run.problems} problems`}</span>}
        </div>
        {run.error && <div class="beside bad">{run.error}</div>}
      </td>
      <td data-name="state">
        <State state={run.state} />
        <div class="beside">{run.state === "running" ? `${run.stage ?? ""}${run.inflight ? ` · ${run.inflight} in flight` : ""}` : run.changed ? ago(Date.now() / 1000 - run.changed) : ""}</div>
      </td>
      <td data-name="progress" class="progress">
        <Meter share={progress.share} label={`progress of ${run.name}`} />
        <div class="beside">
          {of} {progress.unit ?? "steps"}
          {run.state === "running" && progress.seconds_left !== null && progress.seconds_left !== undefined ? ` · ${duration(progress.seconds_left)} left` : ""}
        </div>
      </td>
      <td data-name="reward" class="right">{num(run.reward)}</td>
      <td data-name="over time"><Sparkline values={run.rewards} label="mean reward" /></td>
      <td data-name="solved" class="right">{percent(run.success)}</td>
      <td data-name="tokens" class="right" title={run.prompt_tokens ? `${num(run.prompt_tokens)} prompt tokens` : ""}>{compact(run.tokens)}</td>
      {costs && <td data-name="cost" class="right">{money(run.cost)}</td>}
      <td data-name="time" class="right">{duration(run.seconds)}</td>
    </tr>
  );
}
