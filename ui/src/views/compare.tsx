// Two runs or more beside each other: curves, figures, validations with intervals, and the settings that differ.
import { useState } from "preact/hooks";
import { type Overview, useAsk } from "../api";
import { LineChart, type Series } from "../charts";
import { compact, duration, money, num, percent } from "../format";
import { Choice, Loading, Section, State } from "../parts";
import { link } from "../route";
import { type Report, ResultTable } from "./evaluation";
import { flat } from "./run";
import { Interval, type Over, OVER_NAMES, OVERS } from "./training";

export function Compare({ runs }: { runs: string[] }) {
  return runs.length < 2 ? (
    <main><h1>Compare</h1><p class="empty">Choose two runs or more in the list of runs.</p></main>
  ) : (
    <Comparing key={runs.join("/")} runs={runs} />
  );
}

function Comparing({ runs }: { runs: string[] }) {
  const found = runs.map((run) => useAsk<Overview>("run", { run }, 4000));
  const evaluations = runs.map((run) => useAsk<Report>("evaluation", { run }));
  const [over, setOver] = useState<Over>("step");
  const [all, setAll] = useState(false);
  const missing = found.find((each) => !each.data);
  if (missing) return <main><h1>Compare</h1><Loading error={missing.error} /></main>;
  const data = found.map((each) => each.data!);
  const series = (key: string): Series[] => data.map((each, place) => ({ name: each.id, x: each.curves.train[over] ?? [], y: each.curves.train[key] ?? [], tone: place }));
  const validated = (key: "reward" | "success"): Series[] => data.map((each, place) => ({ name: each.id, x: each.curves.validation.map((row) => row.step), y: each.curves.validation.map((row) => row[key]), tone: place, dots: true }));
  return (
    <main>
      <div class="head-row">
        <h1>Compare</h1>
        <Choice label="curves over" value={over} options={OVERS} onChange={setOver} />
      </div>
      <div class="scroll">
        <table>
          <thead><tr><th>run</th><th>state</th><th class="right">steps</th><th class="right">reward</th><th class="right">solved</th><th class="right">tokens</th><th class="right">cost</th><th class="right">time</th></tr></thead>
          <tbody>
            {data.map((each, place) => (
              <tr key={each.id}>
                <td><span class={`dot tone${place}`} /> <a href={link(["run", each.id])}>{each.id}</a></td>
                <td><State state={each.state} /></td>
                <td class="right">{num(each.progress.steps)}</td>
                <td class="right">{num(each.reward)}</td>
                <td class="right">{percent(each.success)}</td>
                <td class="right">{compact(each.tokens)}</td>
                <td class="right">{money(each.cost)}</td>
                <td class="right">{duration(each.seconds)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <div class="charts">
        <LineChart title="Reward of training batches" xName={OVER_NAMES[over]} series={series("reward")} />
        <LineChart title="Solved in training batches" share xName={OVER_NAMES[over]} series={series("success")} />
        <LineChart title="Reward of validations" xName="step" series={validated("reward")} />
        <LineChart title="Solved in validations" share xName="step" series={validated("success")} />
        <LineChart title="Sampled tokens of an episode" xName={OVER_NAMES[over]} series={series("length")} />
        <LineChart title="Turns of an episode" xName={OVER_NAMES[over]} series={series("turns")} />
      </div>
      <LastValidations data={data} />
      <Evaluations runs={runs} reports={evaluations.map((each) => each.data)} />
      <Differences data={data} all={all} setAll={setAll} />
    </main>
  );
}

/** The reports of runs that are evaluations: overall, and each environment that two of them have. */
function Evaluations({ runs, reports }: { runs: string[]; reports: (Report | null)[] }) {
  const found = runs.map((run, place) => [run, reports[place]] as const).filter(([, report]) => report?.overall);
  if (!found.length) return null;
  const metric = found[0]![1]!.metric;
  const tags = [...new Set(found.flatMap(([, report]) => Object.keys(report!.tags ?? {})))];
  const of = (tag: string) => Object.fromEntries(found.filter(([, report]) => report!.tags?.[tag]).map(([run, report]) => [run, report!.tags![tag]!]));
  return (
    <>
      <Section title="Evaluations" beside="with intervals over tasks"><ResultTable tones rows={Object.fromEntries(found.map(([run, report]) => [run, report!.overall!]))} metric={metric} /></Section>
      {tags.length > 1 && tags.map((tag) => <Section key={tag} title={`Evaluations on ${tag}`}><ResultTable rows={of(tag)} metric={metric} /></Section>)}
    </>
  );
}

function LastValidations({ data }: { data: Overview[] }) {
  const last = data.map((each) => each.curves.validation[each.curves.validation.length - 1]);
  const tags = [...new Set(last.flatMap((row) => Object.keys(row?.tags ?? {})))];
  if (!tags.length) return null;
  return (
    <Section title="Last validation" beside="solved, with 95 % intervals">
      <div class="scroll">
        <table>
          <thead><tr><th>environment</th>{data.map((each, place) => <th key={each.id}><span class={`dot tone${place}`} /> {each.id}</th>)}</tr></thead>
          <tbody>
            {tags.map((tag) => (
              <tr key={tag}>
                <td>{tag}</td>
                {last.map((row, place) => {
                  const each = row?.tags[tag];
                  return <td key={data[place]!.id}>{each ? <Interval share={each.success} interval={each.interval} count={each.episodes} /> : "–"}</td>;
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

function Differences({ data, all, setAll }: { data: Overview[]; all: boolean; setAll: (all: boolean) => void }) {
  const settings = data.map((each) => new Map(flat(each.settings ?? {})));
  const keys = [...new Set(settings.flatMap((each) => [...each.keys()]))];
  const differs = (key: string) => new Set(settings.map((each) => each.get(key) ?? "")).size > 1;
  const shown = keys.filter((key) => all || differs(key));
  return (
    <Section title="Settings" beside={<Choice label="settings" value={all ? "all" : "differ"} options={[["differ", "That differ"], ["all", "All"]]} onChange={(value) => setAll(value === "all")} />}>
      <div class="scroll">
        <table class="settings">
          <thead><tr><th>setting</th>{data.map((each, place) => <th key={each.id}><span class={`dot tone${place}`} /> {each.id}</th>)}</tr></thead>
          <tbody>
            {shown.map((key) => (
              <tr key={key} class={differs(key) ? "differs" : ""}>
                <th scope="row">{key}</th>
                {settings.map((each, place) => <td key={data[place]!.id}>{each.get(key) ?? "–"}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {!shown.length && <p class="faded">the settings are the same</p>}
    </Section>
  );
}
