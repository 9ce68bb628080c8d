// Figures as text.
import type { Maybe } from "./api";

export const NONE = "–";

export function num(value: Maybe<number>, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumFractionDigits: size >= 100 ? 1 : digits });
}

export function signed(value: Maybe<number>): string {
  if (value === null || value === undefined) return NONE;
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + num(Math.abs(value));
}

export function percent(share: Maybe<number>, digits = 0): string {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(digits)} %`;
}

export function compact(value: Maybe<number>): string {
  if (value === null || value === undefined) return NONE;
  for (const [size, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(Math.abs(value) >= 100 * size ? 0 : 1)} ${name}`;
  }
  return String(Math.round(value));
}

export function duration(seconds: Maybe<number>): string {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n: number) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)} h` : `${m}:${two(s)} min`;
}

export function ago(seconds: Maybe<number>): string {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

export function money(value: Maybe<number>): string {
  return value === null || value === undefined ? NONE : `$${value < 10 ? value.toFixed(3) : value.toFixed(2)}`;
}

export function shortId(id: string, run: string): string {
  return id.startsWith(`${run}.`) ? id.slice(run.length + 1) : id;
}

export function count(value: Maybe<number>, noun: string): string {
  return `${num(value)} ${value === 1 ? noun : `${noun}s`}`;
}
