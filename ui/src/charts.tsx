// Charts as SVG: curves, sparklines, histograms. All have a text for screen readers.
import { useState } from "preact/hooks";
import type { Maybe } from "./api";
import { compact, num } from "./format";

export interface Series {
  name: string;
  x: Maybe<number>[];
  y: Maybe<number>[];
  tone?: number;
  dots?: boolean;
  faint?: boolean;
}

type Point = [number, number];

function points(series: Series): Point[] {
  const found: Point[] = [];
  series.y.forEach((y, place) => {
    const x = series.x[place];
    if (typeof y === "number" && typeof x === "number") found.push([x, y]);
  });
  return found;
}

function path(found: Point[], sx: (x: number) => number, sy: (y: number) => number): string {
  return found.map(([x, y], place) => `${place ? "L" : "M"}${sx(x).toFixed(1)} ${sy(y).toFixed(1)}`).join("");
}

export function ticks(low: number, high: number, count: number): number[] {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) ?? raw;
  const found: number[] = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

/** Marks of an axis, with as many digits as it takes to tell them apart. */
function axis(marks: number[]): string[] {
  const step = marks.length > 1 ? Math.abs(marks[1]! - marks[0]!) : 0;
  const most = Math.max(...marks.map(Math.abs));
  const digits = step > 0 ? Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)) : Number.isInteger(marks[0]) ? 0 : 3;
  return marks.map((mark) => (most >= 10000 ? compact(mark) : digits > 9 || (most > 0 && most < 1e-3) ? mark.toExponential(1).replace("0.0e+0", "0") : mark.toFixed(Math.min(digits, 9))));
}

const W = 520;
const PAD = { left: 62, right: 14, top: 12, bottom: 30 };

export function LineChart({ title, series, xName, height = 200, share = false }: { title: string; series: Series[]; xName: string; height?: number; share?: boolean }) {
  const [at, setAt] = useState<number | null>(null);
  const drawn = series.map((each) => ({ ...each, points: points(each) })).filter((each) => each.points.length);
  if (!drawn.length) return null;
  const xs = drawn.flatMap((each) => each.points.map((point) => point[0]));
  const ys = drawn.flatMap((each) => each.points.map((point) => point[1]));
  const min = (values: number[]) => values.reduce((a, b) => Math.min(a, b));
  const max = (values: number[]) => values.reduce((a, b) => Math.max(a, b));
  let [x0, x1, y0, y1] = [min(xs), max(xs), min(ys), max(ys)];
  if (share) [y0, y1] = [Math.min(0, y0), Math.max(1, y1)];
  if (y1 === y0) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.5, y1 + (Math.abs(y1) || 1) * 0.5];
  else if (!share) [y0, y1] = [y0 - (y1 - y0) * 0.06, y1 + (y1 - y0) * 0.06];
  const sx = (x: number) => PAD.left + (x1 === x0 ? 0.5 : (x - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const sy = (y: number) => height - PAD.bottom - ((y - y0) / (y1 - y0)) * (height - PAD.top - PAD.bottom);
  const near = (found: Point[]) => (at === null ? null : found.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best)));
  const summary = drawn.map((each) => `${each.name}: ${num(each.points[0]![1])} to ${num(each.points[each.points.length - 1]![1])}`).join("; ");
  const shown = drawn.filter((each) => !each.faint);
  return (
    <figure class="chart">
      <figcaption>
        <span>{title}</span>
        <span class="legend">
          {shown.map((each, place) => {
            const point = near(each.points);
            return (
              <span key={place} class={`key tone${each.tone ?? place}`}>
                {shown.length > 1 && <span class="key-name">{each.name}</span>} <b>{num((point ?? each.points[each.points.length - 1]!)[1])}</b>
              </span>
            );
          })}
        </span>
      </figcaption>
      <svg
        viewBox={`0 0 ${W} ${height}`}
        role="img"
        aria-label={`${title} over ${xName}. ${summary}`}
        onMouseMove={(event) => {
          const box = (event.currentTarget as SVGElement).getBoundingClientRect();
          const x = ((event.clientX - box.left) / box.width) * W;
          setAt(x0 + ((x - PAD.left) / (W - PAD.left - PAD.right)) * (x1 - x0));
        }}
        onMouseLeave={() => setAt(null)}
      >
        {ticks(y0, y1, 4).map((y, place, marks) => (
          <g key={y}>
            <line class="grid" x1={PAD.left} x2={W - PAD.right} y1={sy(y)} y2={sy(y)} />
            <text class="tick" x={PAD.left - 7} y={sy(y) + 4} text-anchor="end">
              {axis(marks)[place]}
            </text>
          </g>
        ))}
        {ticks(x0, x1, 5).map((x, place, marks) => (
          <text key={x} class="tick" x={sx(x)} y={height - 12} text-anchor="middle">
            {axis(marks)[place]}
          </text>
        ))}
        <text class="tick axis" x={W - PAD.right} y={height - 1} text-anchor="end">
          {xName}
        </text>
        {at !== null && <line class="cursor" x1={sx(Math.min(x1, Math.max(x0, at)))} x2={sx(Math.min(x1, Math.max(x0, at)))} y1={PAD.top} y2={height - PAD.bottom} />}
        {drawn.map((each, place) => (
          <g key={place} class={`tone${each.tone ?? place}`}>
            <path class={each.faint ? "line faint" : "line"} d={path(each.points, sx, sy)} />
            {(each.dots || each.points.length === 1) && each.points.map(([x, y], at) => <circle key={at} cx={sx(x)} cy={sy(y)} r="3.2" />)}
          </g>
        ))}
      </svg>
    </figure>
  );
}

export function Sparkline({ values, label }: { values: Maybe<number>[]; label: string }) {
  const known = values.filter((each): each is number => typeof each === "number");
  if (!known.length) return <span class="faded">–</span>;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const sx = (x: number) => 2 + (values.length < 2 ? 0.5 : x / (values.length - 1)) * 96;
  const sy = (y: number) => (high === low ? 12 : 21 - ((y - low) / (high - low)) * 18);
  const found = values.flatMap((y, x) => (typeof y === "number" ? [[x, y] as Point] : []));
  const last = found[found.length - 1]!;
  return (
    <svg class="spark" viewBox="0 0 100 24" role="img" aria-label={`${label}: from ${num(known[0])} to ${num(known[known.length - 1])}`}>
      <path class="line" d={path(found, sx, sy)} />
      <circle cx={sx(last[0])} cy={sy(last[1])} r="2.2" />
    </svg>
  );
}

export function Histogram({ title, counts, unit }: { title: string; counts: [string, number][]; unit: string }) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  const most = Math.max(1, ...counts.map(([, count]) => count));
  return (
    <figure class="histogram">
      <figcaption>{title}</figcaption>
      <ul>
        {counts.map(([name, count]) => (
          <li key={name}>
            <span class="name">{name}</span>
            <span class="bar" aria-hidden="true">
              <span style={{ width: `${(100 * count) / most}%` }} />
            </span>
            <span class="count">
              {compact(count)} {unit} · {total ? ((100 * count) / total).toFixed(0) : 0} %
            </span>
          </li>
        ))}
      </ul>
    </figure>
  );
}

export interface Part {
  name: string;
  count: number;
  tone: string;
}

/** Parts of a whole as one bar. */
export function Stacked({ parts, whole, label }: { parts: Part[]; whole?: number; label: string }) {
  const total = Math.max(whole ?? 0, parts.reduce((sum, part) => sum + part.count, 0)) || 1;
  const text = parts.map((part) => `${part.count} ${part.name}`).join(", ");
  return (
    <div class="stacked-box">
      <div class="stacked" role="img" aria-label={`${label}: ${text}`}>
        {parts.map((part) => (
          <span key={part.name} class={`phase-${part.tone}`} style={{ width: `${(100 * part.count) / total}%` }} />
        ))}
      </div>
      <div class="stacked-legend" aria-hidden="true">
        {parts.map((part) => (
          <span key={part.name}>
            <i class={`phase-${part.tone}`} /> {part.name} <b>{num(part.count)}</b>
          </span>
        ))}
      </div>
    </div>
  );
}

export function Meter({ share, label }: { share: Maybe<number>; label: string }) {
  if (share === null || share === undefined) return null;
  return (
    <div class="meter" role="progressbar" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(100 * share)}>
      <span style={{ width: `${100 * share}%` }} />
    </div>
  );
}
