// The report of an evaluation: its table with intervals. The report is shown as far as it is understood, the rest as it is.
import { type Dict, useAsk } from "../api";
import { num } from "../format";
import { Loading, Section } from "../parts";
import { Code } from "../text";

export function EvaluationView({ run }: { run: string }) {
  const { data, error } = useAsk<Dict<any>>("evaluation", { run }, 4000);
  if (!data) return <Loading error={error} />;
  if (data.problem) return <p class="failure" role="alert">{data.problem}</p>;
  const tables = Object.entries(data).filter(([, value]) => Array.isArray(value) && value.length && value.every((each) => each && typeof each === "object" && !Array.isArray(each)));
  const rest = Object.fromEntries(Object.entries(data).filter(([key]) => !tables.some(([name]) => name === key)));
  return (
    <>
      {tables.map(([name, rows]) => (
        <Section key={name} title={name}>
          <EvaluationTable rows={rows as Dict<any>[]} />
        </Section>
      ))}
      <Section title="Report"><Code text={JSON.stringify(rest, null, 2)} language="json" /></Section>
    </>
  );
}

export function EvaluationTable({ rows }: { rows: Dict<any>[] }) {
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))].slice(0, 12);
  return (
    <div class="scroll">
      <table>
        <thead><tr>{keys.map((key) => <th key={key}>{key}</th>)}</tr></thead>
        <tbody>
          {rows.map((row, place) => (
            <tr key={place}>{keys.map((key) => <td key={key}>{cell(row[key])}</td>)}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function cell(value: unknown): string {
  if (typeof value === "number") return num(value);
  if (Array.isArray(value) && value.every((each) => typeof each === "number")) return value.map((each) => num(each)).join(" – ");
  return value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
}
